"""Tiny autoencoders: a way to build each, and what to encode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .weights import made


@dataclass(frozen=True)
class Autoencoder:
    """A class of diffusers, its configuration, and the shape of what it encodes."""

    name: str
    config: dict[str, Any]
    shape: tuple[int, ...]

    def build(self) -> Any:
        import diffusers

        return made(lambda: getattr(diffusers, self.name)(**self.config))

    def exists(self) -> bool:
        import diffusers

        return hasattr(diffusers, self.name)

    def example(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1))


IMAGE, TALL, VIDEO = (1, 3, 16, 16), (1, 3, 64, 64), (1, 3, 5, 16, 16)
KL = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
DOWN2, UP2 = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2

ALL = (
    Autoencoder("AutoencoderKL", {**KL, "down_block_types": DOWN2, "up_block_types": UP2, "sample_size": 32}, TALL),
    Autoencoder(
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": DOWN2,
            "up_block_types": UP2,
            "down_block_out_channels": (8, 8),
            "up_block_out_channels": (8, 8),
            "norm_num_groups": 4,
        },
        IMAGE,
    ),
    Autoencoder("AutoencoderKLTemporalDecoder", {"down_block_types": DOWN2, "block_out_channels": (32, 32)}, IMAGE),
    Autoencoder("AutoencoderTiny", {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}, TALL),
    Autoencoder(
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 2,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        TALL,
    ),
    Autoencoder(
        "AutoencoderKLFlux2",
        {**KL, "down_block_types": DOWN2, "up_block_types": UP2, "latent_channels": 4, "sample_size": 32},
        TALL,
    ),
    Autoencoder(
        "AutoencoderKLWan",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]},
        VIDEO,
    ),
    Autoencoder(
        "AutoencoderKLQwenImage",
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]},
        (1, 3, 1, 16, 16),
    ),
    Autoencoder(
        "AutoencoderKLHunyuanVideo",
        {
            "latent_channels": 4,
            "block_out_channels": (8, 8, 8, 8),
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        VIDEO,
    ),
    Autoencoder(
        "AutoencoderKLCogVideoX",
        {
            "block_out_channels": (8, 8, 8, 8),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "sample_height": 16,
            "sample_width": 16,
        },
        VIDEO,
    ),
    Autoencoder(
        "AutoencoderKLLTXVideo",
        {
            "latent_channels": 8,
            "block_out_channels": (8, 8, 8, 8),
            "decoder_block_out_channels": (8, 8, 8, 8),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
        },
        (1, 3, 9, 32, 32),
    ),
    Autoencoder(
        "AutoencoderKLAllegro",
        {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 2, "layers_per_block": 1, "sample_size": 16},
        (1, 3, 4, 32, 32),
    ),
    Autoencoder(
        "AutoencoderKLMagvit",
        {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 2, "layers_per_block": 1, "latent_channels": 4},
        (1, 3, 5, 16, 16),
    ),
    Autoencoder(
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": (32, 32, 32, 32),
            "decoder_block_out_channels": (32, 32, 32, 32),
            "layers_per_block": (1, 1, 1, 1, 1),
            "latent_channels": 4,
            "add_attention_block": (False, False, False, False, False),
            "latents_mean": None,
            "latents_std": None,
        },
        (1, 3, 7, 16, 16),
    ),
    Autoencoder(
        "AutoencoderKLHunyuanImage",
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": (32, 32),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "sample_size": 16,
        },
        IMAGE,
    ),
    Autoencoder(
        "AutoencoderKLCosmos",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8, 8),
            "decode_block_out_channels": (8, 8, 8),
            "attention_resolutions": (4,),
            "resolution": 32,
            "num_layers": 1,
            "patch_size": 2,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
            "latents_mean": None,
            "latents_std": None,
        },
        (1, 3, 9, 32, 32),
    ),
)

NAMED = {one.name: one for one in ALL}

#: What a user does with an autoencoder; each takes it and an input on the device, and returns a tensor.
Use = Callable[[Any, torch.Tensor], torch.Tensor]


def latent(output: Any) -> Any:
    """The latent of whatever an `encode` returned."""
    distribution = getattr(output, "latent_dist", None)
    if distribution is not None:
        return distribution.mode()
    return getattr(output, "latent", getattr(output, "latents", None))


def round_trip(model: Any, x: torch.Tensor) -> torch.Tensor:
    """`encode`, then `decode`."""
    z = latent(model.encode(x))
    more = {"num_frames": 1} if type(model).__name__ == "AutoencoderKLTemporalDecoder" else {}
    sample: torch.Tensor = model.decode(z, **more).sample
    return sample


def tiled(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The same in tiles."""
    model.enable_tiling()
    try:
        return round_trip(model, x)
    finally:
        model.disable_tiling()


def sliced(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The same for a batch that is taken apart."""
    model.enable_slicing()
    try:
        return round_trip(model, torch.cat([x, x * 0.5]))
    finally:
        model.disable_slicing()


def one_by_one(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each part by itself, as a pipeline's own tiling does."""
    h = model.encoder(x)
    return h if getattr(model, "quant_conv", None) is None else model.quant_conv(h)
