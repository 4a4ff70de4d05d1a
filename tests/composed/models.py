"""Tiny models of diffusers' own classes, and adapters for them, made from configs and seeds alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from diffusers_offload_fix.check import pipeline

Weights = str
TOKENS, WIDTH = pipeline.TOKENS, pipeline.WIDTH


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def flux(weights: Weights = "plain", blocks: int = 2, seed: int = 0) -> Any:
    """A Flux transformer on the CPU."""
    with seeded(seed):
        model = pipeline.build_transformer(blocks)
    pipeline.quantise(model, weights)
    return model


def flux_inputs(device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """What a Flux transformer takes; it follows from the seed, whatever the device."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return {
        "hidden_states": random(1, 16, 4 * pipeline.LATENTS),
        "encoder_hidden_states": random(1, TOKENS, WIDTH),
        "pooled_projections": random(1, WIDTH),
        "timestep": torch.tensor([0.5], device=device, dtype=dtype),
        "img_ids": torch.zeros(16, 3, device=device, dtype=dtype),
        "txt_ids": torch.zeros(TOKENS, 3, device=device, dtype=dtype),
    }


def flux_pipeline(weights: Weights = "plain") -> Any:
    """A Flux pipeline on the CPU."""
    return pipeline.build(weights)


def unet() -> Any:
    """A UNet of Stable Diffusion on the CPU."""
    from diffusers import UNet2DConditionModel

    with seeded(1):
        model = UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=WIDTH,
            attention_head_dim=4,
            norm_num_groups=4,
        )
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def unet_inputs(device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return {
        "sample": torch.randn(1, 4, 8, 8, generator=generator).to(device, dtype),
        "timestep": 5,
        "encoder_hidden_states": torch.randn(1, TOKENS, WIDTH, generator=generator).to(device, dtype),
        "added_cond_kwargs": {"image_embeds": [torch.randn(1, 1, 8, generator=generator).to(device, dtype)]},
    }


def text_encoder(weights: Weights = "plain") -> Any:
    """A CLIP text encoder on the CPU."""
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": WIDTH, "max_position_embeddings": 16}
    with seeded(2):
        model = CLIPTextModel(CLIPTextConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))
    return model.eval().requires_grad_(False)


def text_inputs(device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Tokens, among them the last of the vocabulary."""
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(0, 62, (1, TOKENS), generator=generator)
    tokens[0, 0] = 62
    return {"input_ids": tokens.to(device)}


def lora(model: Any, seed: int = 0, *, rank: int = 4, zero: bool = False, prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    """A LoRA state dict for the attention projections of a model, in diffusers' format."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] not in ("to_q", "to_k", "to_v") or not hasattr(module, "in_features"):
            continue
        down = torch.randn(rank, module.in_features, generator=generator) * 0.1
        up = torch.randn(module.out_features, rank, generator=generator) * (0.0 if zero else 0.1)
        found[f"{prefix}{name}.lora_A.weight"] = down.to(torch.bfloat16)
        found[f"{prefix}{name}.lora_B.weight"] = up.to(torch.bfloat16)
    return found
