"""Models of real widths with random weights, the same in every process, and inputs for them."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from diffusers_offload_fix import tree

from .options import Options

SEED = 20


def model(options: Options, quant: str, device: torch.device) -> Any:
    """The model on the CPU, in bfloat16 or quantised. It is filled on the device, which is much faster."""
    torch.manual_seed(SEED)
    with torch.device(device), _default_dtype(torch.bfloat16):
        made = {"flux": _flux, "wan": _wan}[options.model](options)
    made = made.to(torch.bfloat16).eval().requires_grad_(False)
    _quantise(made, quant)
    return made.to("cpu")


def inputs(options: Options, batch: int, device: torch.device) -> dict[str, Any]:
    """Arguments for one forward, the same in every process."""
    maker = {"flux": _flux_inputs, "wan": _wan_inputs}[options.model]
    generator = torch.Generator("cpu").manual_seed(SEED + batch)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    return {**maker(options, batch, device, noise), "return_dict": False}


@contextlib.contextmanager
def denoising(steps: int) -> Iterator[None]:
    """What a pipeline has around its denoising steps: its progress bar, which tells the plugin that forwards follow one another."""
    from diffusers import DiffusionPipeline

    holder: Any = types.SimpleNamespace(_progress_bar_config={"disable": True})
    with DiffusionPipeline.progress_bar(holder, total=steps):
        yield


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of every parameter and buffer, tied ones once."""
    seen: dict[int, int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        for leaf in tree.Tree(tensor).leaves:
            seen[id(leaf)] = leaf.numel() * leaf.element_size()
    return sum(seen.values())


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _flux(options: Options) -> Any:
    from diffusers import FluxTransformer2DModel

    double, single = options.blocks
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=128,
        num_attention_heads=options.heads,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=False,
    )


def _flux_inputs(options: Options, batch: int, device: torch.device, noise: Any) -> dict[str, Any]:
    side = max(1, int(options.tokens**0.5))
    ids = torch.zeros(options.tokens, 3, device=device)
    index = torch.arange(options.tokens, device=device)
    ids[:, 1], ids[:, 2] = index // side, index % side
    return {
        "hidden_states": noise(batch, options.tokens, 64),
        "encoder_hidden_states": noise(batch, options.text, 4096),
        "pooled_projections": noise(batch, 768),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=torch.bfloat16),
        "img_ids": ids,
        "txt_ids": torch.zeros(options.text, 3, device=device),
    }


def _wan(options: Options) -> Any:
    from diffusers import WanTransformer3DModel

    (layers,) = options.blocks
    # 13824 for 40 heads, as in the 14B model
    feed_forward = 13824 * options.heads // 40
    return WanTransformer3DModel(num_attention_heads=options.heads, ffn_dim=feed_forward, num_layers=layers)


def _wan_inputs(options: Options, batch: int, device: torch.device, noise: Any) -> dict[str, Any]:
    side = max(1, int(options.tokens**0.5))
    return {
        "hidden_states": noise(batch, 16, 1, 2 * side, 2 * max(1, options.tokens // side)),
        "timestep": torch.full((batch,), 500, device=device),
        "encoder_hidden_states": noise(batch, options.text, 4096),
    }


def _quantise(made: Any, quant: str) -> None:
    if quant in ("int8", "float8"):
        from torchao import quantization

        config: Any = getattr(quantization, {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}[quant])
        newest = {"version": 2} if "version" in inspect.signature(config).parameters else {}
        quantization.quantize_(made, config(**newest))
    elif quant == "quanto-int8":
        from optimum import quanto

        quanto.quantize(made, weights=quanto.qint8)
        quanto.freeze(made)
