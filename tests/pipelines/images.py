"""Pipelines that make images."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from .encoders import clip_config
from .parts import TOKENS, WIDTH, absent, flow, kl, numbers
from .weights import made


def _control(pipe: Any, argument: str, scale: float) -> dict[str, Any]:
    """What a call gives to one ControlNet, or to each of several."""
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    nets = getattr(pipe.controlnet, "nets", None)
    if nets is None:
        return {argument: image}
    return {argument: [image] * len(nets), "controlnet_conditioning_scale": [scale] * len(nets)}


# Flux --------------------


def _flux_transformer() -> Any:
    from diffusers import FluxTransformer2DModel

    return made(
        lambda: FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        )
    )


_FLUX_ABSENT = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def flux() -> Any:
    from diffusers import FluxPipeline

    return FluxPipeline(scheduler=flow(), vae=kl(), transformer=_flux_transformer(), **absent(*_FLUX_ABSENT))


def flux_controlnet(count: int) -> Any:
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    transformer = _flux_transformer()
    config = {name: value for name, value in dict(transformer.config).items() if not name.startswith("_")}
    config.pop("out_channels", None)
    nets = [made(lambda: FluxControlNetModel(**config), seed=1 + index) for index in range(count)]
    return FluxControlNetPipeline(
        scheduler=flow(),
        vae=kl(),
        transformer=transformer,
        controlnet=nets[0] if count == 1 else nets,
        **absent(*_FLUX_ABSENT),
    )


def call_flux(pipe: Any, device: torch.device, generator: torch.Generator, **more: Any) -> torch.Tensor:
    images: torch.Tensor = pipe(
        prompt_embeds=numbers(device, 1, TOKENS, WIDTH),
        pooled_prompt_embeds=numbers(device, 1, WIDTH, seed=4),
        height=16,
        width=16,
        num_inference_steps=2,
        generator=generator,
        output_type="pt",
        **more,
    ).images
    return images


def call_flux_controlnet(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return call_flux(pipe, device, generator, **_control(pipe, "control_image", 1.0))


# Stable Diffusion 3 --------------------


def sd3() -> Any:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = made(
        lambda: SD3Transformer2DModel(
            sample_size=8,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            pos_embed_max_size=16,
        )
    )
    names = [f"{kind}{suffix}" for kind in ("text_encoder", "tokenizer") for suffix in ("", "_2", "_3")]
    return StableDiffusion3Pipeline(scheduler=flow(), vae=kl(), transformer=transformer, **absent(*names))


def call_sd3(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    images: torch.Tensor = pipe(
        prompt_embeds=numbers(device, 1, TOKENS, WIDTH),
        pooled_prompt_embeds=numbers(device, 1, WIDTH, seed=4),
        negative_prompt_embeds=numbers(device, 1, TOKENS, WIDTH, seed=5),
        negative_pooled_prompt_embeds=numbers(device, 1, WIDTH, seed=6),
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=5.0,
        generator=generator,
        output_type="pt",
    ).images
    return images


# Stable Diffusion XL --------------------


def _clip_tokenizer() -> Any:
    """A tokenizer that knows the letters, made on the fly."""
    from transformers import CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    words = ["<|startoftext|>", *letters, *(f"{letter}</w>" for letter in letters), "!", "!</w>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary["<|endoftext|>"] = clip_config()["vocab_size"] - 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps(vocabulary))
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer(
            *_files(folder),
            unk_token="<|endoftext|>",
            pad_token="!",
            bos_token="<|startoftext|>",
            eos_token="<|endoftext|>",
            model_max_length=77,
        )


def _files(folder: str) -> tuple[str, str]:
    return str(Path(folder, "vocab.json")), str(Path(folder, "merges.txt"))


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    return made(
        lambda: UNet2DConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=WIDTH + 6 * 8,
            cross_attention_dim=2 * WIDTH,
            norm_num_groups=8,
        )
    )


def _sdxl_parts() -> dict[str, Any]:
    from diffusers import EulerDiscreteScheduler
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(**clip_config())
    return {
        "unet": _unet(),
        "scheduler": EulerDiscreteScheduler(),
        "vae": kl(use_quant_conv=True, use_post_quant_conv=True, shift_factor=None),
        "text_encoder": made(lambda: CLIPTextModel(config)),
        "text_encoder_2": made(lambda: CLIPTextModelWithProjection(config), seed=1),
        "tokenizer": _clip_tokenizer(),
        "tokenizer_2": _clip_tokenizer(),
    }


def sdxl() -> Any:
    from diffusers import StableDiffusionXLPipeline

    return StableDiffusionXLPipeline(**_sdxl_parts(), add_watermarker=False)


def sdxl_controlnet(count: int) -> Any:
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

    parts = _sdxl_parts()
    nets = [
        made(lambda: ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(16, 32)), seed=1 + index)
        for index in range(count)
    ]
    return StableDiffusionXLControlNetPipeline(**parts, controlnet=nets[0] if count == 1 else nets, add_watermarker=False)


def call_sdxl(pipe: Any, device: torch.device, generator: torch.Generator, **more: Any) -> torch.Tensor:
    images: torch.Tensor = pipe(
        prompt="a cat",
        negative_prompt="dog",
        clip_skip=1,
        height=16,
        width=16,
        num_inference_steps=2,
        guidance_scale=5.0,
        generator=generator,
        output_type="pt",
        **more,
    ).images
    return images


def call_sdxl_controlnet(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return call_sdxl(pipe, device, generator, **_control(pipe, "image", 0.5))
