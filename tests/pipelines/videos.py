"""Pipelines that make videos, and QwenImage, whose autoencoder is one for videos."""

from __future__ import annotations

from typing import Any

import torch

from .autoencoders import NAMED as AUTOENCODERS
from .parts import TOKENS, WIDTH, absent, flow, numbers
from .weights import made

# Qwen-Image --------------------


def _video_autoencoder(name: str, **more: Any) -> Any:
    import diffusers

    return made(lambda: getattr(diffusers, name)(**{**AUTOENCODERS[name].config, **more}))


def qwen() -> Any:
    from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

    transformer = made(
        lambda: QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(8, 4, 4),
        )
    )
    vae = _video_autoencoder("AutoencoderKLQwenImage", latents_mean=[0.1] * 4, latents_std=[1.1] * 4)
    return QwenImagePipeline(scheduler=flow(), vae=vae, transformer=transformer, **absent("text_encoder", "tokenizer"))


def call_qwen(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    mask = torch.ones(1, TOKENS, dtype=torch.int64, device=device)
    images: torch.Tensor = pipe(
        prompt_embeds=numbers(device, 1, TOKENS, WIDTH),
        prompt_embeds_mask=mask,
        negative_prompt_embeds=numbers(device, 1, TOKENS, WIDTH, seed=5),
        negative_prompt_embeds_mask=mask,
        true_cfg_scale=2.0,
        height=32,
        width=32,
        num_inference_steps=2,
        generator=generator,
        output_type="pt",
    ).images
    return images


# Video --------------------


def wan() -> Any:
    from diffusers import WanPipeline, WanTransformer3DModel

    def transformer(seed: int) -> Any:
        return made(
            lambda: WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=16,
                in_channels=4,
                out_channels=4,
                text_dim=WIDTH,
                freq_dim=32,
                ffn_dim=64,
                num_layers=2,
                cross_attn_norm=True,
                qk_norm="rms_norm_across_heads",
                rope_max_seq_len=32,
            ),
            seed,
        )

    vae = _video_autoencoder("AutoencoderKLWan", latents_mean=[0.1] * 4, latents_std=[1.1] * 4)
    return WanPipeline(
        transformer=transformer(0),
        transformer_2=transformer(1),
        boundary_ratio=0.8,
        vae=vae,
        scheduler=flow(),
        **absent("text_encoder", "tokenizer"),
    )


def hunyuan() -> Any:
    from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel

    transformer = made(
        lambda: HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            rope_axes_dim=(4, 6, 6),
        )
    )
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return HunyuanVideoPipeline(
        transformer=transformer, vae=_video_autoencoder("AutoencoderKLHunyuanVideo"), scheduler=flow(), **absent(*names)
    )


def ltx() -> Any:
    from diffusers import LTXPipeline, LTXVideoTransformer3DModel

    transformer = made(
        lambda: LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=WIDTH,
            num_layers=2,
            caption_channels=WIDTH,
        )
    )
    return LTXPipeline(
        transformer=transformer,
        vae=_video_autoencoder("AutoencoderKLLTXVideo"),
        scheduler=flow(),
        **absent("text_encoder", "tokenizer"),
    )


def cogvideox() -> Any:
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    transformer = made(
        lambda: CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=WIDTH,
            num_layers=2,
            sample_width=2,
            sample_height=2,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=TOKENS,
        )
    )
    return CogVideoXPipeline(
        transformer=transformer,
        vae=_video_autoencoder("AutoencoderKLCogVideoX"),
        scheduler=CogVideoXDDIMScheduler(),
        **absent("text_encoder", "tokenizer"),
    )


def _frames(pipe: Any, device: torch.device, generator: torch.Generator, **more: Any) -> torch.Tensor:
    frames: torch.Tensor = pipe(
        prompt_embeds=numbers(device, 1, TOKENS, WIDTH),
        generator=generator,
        output_type="pt",
        **{"height": 16, "width": 16, "num_inference_steps": 2, **more},
    ).frames
    return frames


def _negative(device: torch.device) -> dict[str, Any]:
    return {"negative_prompt_embeds": numbers(device, 1, TOKENS, WIDTH, seed=5), "guidance_scale": 5.0}


def call_wan(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return _frames(pipe, device, generator, num_frames=5, num_inference_steps=3, **_negative(device))


def call_hunyuan(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    more = {"pooled_prompt_embeds": numbers(device, 1, WIDTH, seed=4), "prompt_attention_mask": torch.ones(1, TOKENS, device=device)}
    return _frames(pipe, device, generator, num_frames=5, **more)


def call_ltx(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    mask = torch.ones(1, TOKENS, device=device)
    masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
    return _frames(pipe, device, generator, num_frames=9, height=32, width=32, **masks, **_negative(device))


def call_cogvideox(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return _frames(pipe, device, generator, num_frames=8, max_sequence_length=TOKENS, **_negative(device))
