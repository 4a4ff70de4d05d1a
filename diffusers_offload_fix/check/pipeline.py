"""A tiny Flux pipeline, made from configs alone: nothing is downloaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

WIDTH = 32
TOKENS = 8
# As many as in Flux itself; torch's int8 kernel for the CPU reads past the end of rows that are much shorter.
LATENTS = 16


def build(weights: str = "plain", *, blocks: int = 2, seed: int = 0) -> Any:
    """A `FluxPipeline` on the CPU, with its transformer's linears quantised as `weights` says.

    Args:
        weights: a key of `cases.WEIGHTS`.
        blocks: how many blocks of either kind the transformer has.
        seed: the values of the weights follow from it.
    """
    with _seeded(seed):
        transformer = build_transformer(blocks)
        vae = build_vae()
    quantise(transformer, weights)
    return assemble(transformer, vae)


def assemble(transformer: Any, vae: Any) -> Any:
    """The pipeline around these models; it has no text encoders and takes embeddings."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, transformer=transformer, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_transformer(blocks: int = 2) -> Any:
    """A Flux transformer of a few thousand parameters, in bfloat16."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENTS,
        num_layers=blocks,
        num_single_layers=blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def build_vae() -> Any:
    """An autoencoder that fits the transformer."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(4,),
        latent_channels=LATENTS,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def quantise(model: torch.nn.Module, weights: str, which: Callable[[torch.nn.Module, str], bool] | None = None) -> None:
    """Quantises a model's linears in place, as a user of the library would.

    Args:
        which: told a module and its name, says whether torchao is to quantise it; by default each linear.
    """
    if weights == "torchao-int8":
        _quantise_torchao(model, which)
    elif weights == "quanto-qint8":
        from optimum import quanto

        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
    elif weights != "plain":
        raise ValueError(f"weights of the kind {weights!r} are not known")


def _quantise_torchao(model: torch.nn.Module, which: Callable[[torch.nn.Module, str], bool] | None) -> None:
    import torchao.quantization as torchao

    config = getattr(torchao, "Int8WeightOnlyConfig", None)
    if config is None:
        torchao.quantize_(model, torchao.int8_weight_only(), which)
        return
    try:
        torchao.quantize_(model, config(version=2), which)
    except TypeError:  # a release that has no versions of it yet
        torchao.quantize_(model, config(), which)


def call(pipe: Any, device: torch.device, seed: int = 0) -> torch.Tensor:
    """One image, as a tensor on the CPU; it follows from `seed`, whatever the device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    prompt = torch.randn(1, TOKENS, WIDTH, generator=generator)
    pooled = torch.randn(1, WIDTH, generator=generator)
    done = pipe(
        prompt_embeds=prompt.to(device, torch.bfloat16),
        pooled_prompt_embeds=pooled.to(device, torch.bfloat16),
        height=32,
        width=32,
        num_inference_steps=2,
        generator=generator,
        output_type="pt",
    )
    images: torch.Tensor = done.images
    return images.cpu()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def hush() -> None:
    """Quietens libraries that talk while they are imported and while a pipeline is made."""
    for name in ("diffusers", "torchao", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
