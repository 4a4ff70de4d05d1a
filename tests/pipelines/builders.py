"""Tiny pipelines of real diffusers classes: how each is built, and one call of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .autoencoders import NAMED as AUTOENCODERS
from .encoders import clip_config
from .weights import made, quantise

WIDTH, TOKENS = 32, 8


@dataclass(frozen=True)
class Pipeline:
    """One pipeline.

    Attributes:
        construct: makes it on the CPU, in float32.
        call: runs it: `call(pipe, device, generator)` returns images or frames as a tensor.
        quantised: the components that are quantised if that is asked for.
    """

    name: str
    construct: Callable[[], Any]
    call: Callable[[Any, torch.device, torch.Generator], torch.Tensor]
    quantised: tuple[str, ...] = ("transformer",)

    def build(self, weights: str = "plain") -> Any:
        """The pipeline on the CPU, with its denoisers' linears quantised as `weights` says."""
        pipe = self.construct()
        pipe.set_progress_bar_config(disable=True)
        for name in self.quantised:
            quantise(getattr(pipe, name), weights)
        return pipe

    def run(self, pipe: Any, device: torch.device, seed: int = 0) -> torch.Tensor:
        """One call, as a tensor on the CPU; it follows from `seed`, whatever the device."""
        with torch.no_grad():
            return self.call(pipe, device, torch.Generator().manual_seed(seed)).cpu()


def modules(pipe: Any) -> dict[str, torch.nn.Module]:
    """The components that have weights."""
    return {name: value for name, value in pipe.components.items() if isinstance(value, torch.nn.Module)}


def _numbers(device: torch.device, *shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _absent(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


def _flow() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def _kl(**more: Any) -> Any:
    import diffusers

    config = {"latent_channels": 4, "use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.06, "scaling_factor": 1.5}
    return made(lambda: diffusers.AutoencoderKL(**{**AUTOENCODERS["AutoencoderKL"].config, **config, **more}))


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


def _flux() -> Any:
    from diffusers import FluxPipeline

    return FluxPipeline(scheduler=_flow(), vae=_kl(), transformer=_flux_transformer(), **_absent(*_FLUX_ABSENT))


def _flux_controlnet(count: int) -> Any:
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    transformer = _flux_transformer()
    config = {name: value for name, value in dict(transformer.config).items() if not name.startswith("_")}
    config.pop("out_channels", None)
    nets = [made(lambda: FluxControlNetModel(**config), seed=1 + index) for index in range(count)]
    return FluxControlNetPipeline(
        scheduler=_flow(),
        vae=_kl(),
        transformer=transformer,
        controlnet=nets[0] if count == 1 else nets,
        **_absent(*_FLUX_ABSENT),
    )


def _call_flux(pipe: Any, device: torch.device, generator: torch.Generator, **more: Any) -> torch.Tensor:
    images: torch.Tensor = pipe(
        prompt_embeds=_numbers(device, 1, TOKENS, WIDTH),
        pooled_prompt_embeds=_numbers(device, 1, WIDTH, seed=4),
        height=16,
        width=16,
        num_inference_steps=2,
        generator=generator,
        output_type="pt",
        **more,
    ).images
    return images


def _call_flux_controlnet(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    nets = getattr(pipe.controlnet, "nets", None)
    many = {} if nets is None else {"controlnet_conditioning_scale": [1.0] * len(nets)}
    return _call_flux(pipe, device, generator, control_image=image if nets is None else [image] * len(nets), **many)


# Stable Diffusion 3 --------------------


def _sd3() -> Any:
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
    return StableDiffusion3Pipeline(scheduler=_flow(), vae=_kl(), transformer=transformer, **_absent(*names))


def _call_sd3(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    images: torch.Tensor = pipe(
        prompt_embeds=_numbers(device, 1, TOKENS, WIDTH),
        pooled_prompt_embeds=_numbers(device, 1, WIDTH, seed=4),
        negative_prompt_embeds=_numbers(device, 1, TOKENS, WIDTH, seed=5),
        negative_pooled_prompt_embeds=_numbers(device, 1, WIDTH, seed=6),
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
        "vae": _kl(use_quant_conv=True, use_post_quant_conv=True, shift_factor=None),
        "text_encoder": made(lambda: CLIPTextModel(config)),
        "text_encoder_2": made(lambda: CLIPTextModelWithProjection(config), seed=1),
        "tokenizer": _clip_tokenizer(),
        "tokenizer_2": _clip_tokenizer(),
    }


def _sdxl() -> Any:
    from diffusers import StableDiffusionXLPipeline

    return StableDiffusionXLPipeline(**_sdxl_parts(), add_watermarker=False)


def _sdxl_controlnet(count: int) -> Any:
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

    parts = _sdxl_parts()
    nets = [
        made(lambda: ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(16, 32)), seed=1 + index)
        for index in range(count)
    ]
    return StableDiffusionXLControlNetPipeline(**parts, controlnet=nets[0] if count == 1 else nets, add_watermarker=False)


def _call_sdxl(pipe: Any, device: torch.device, generator: torch.Generator, **more: Any) -> torch.Tensor:
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


def _call_sdxl_controlnet(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    nets = getattr(pipe.controlnet, "nets", None)
    many = {} if nets is None else {"controlnet_conditioning_scale": [0.5] * len(nets)}
    return _call_sdxl(pipe, device, generator, image=image if nets is None else [image] * len(nets), **many)


# Qwen-Image --------------------


def _video_autoencoder(name: str, **more: Any) -> Any:
    import diffusers

    return made(lambda: getattr(diffusers, name)(**{**AUTOENCODERS[name].config, **more}))


def _qwen() -> Any:
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
    return QwenImagePipeline(scheduler=_flow(), vae=vae, transformer=transformer, **_absent("text_encoder", "tokenizer"))


def _call_qwen(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    mask = torch.ones(1, TOKENS, dtype=torch.int64, device=device)
    images: torch.Tensor = pipe(
        prompt_embeds=_numbers(device, 1, TOKENS, WIDTH),
        prompt_embeds_mask=mask,
        negative_prompt_embeds=_numbers(device, 1, TOKENS, WIDTH, seed=5),
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


def _wan() -> Any:
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
        scheduler=_flow(),
        **_absent("text_encoder", "tokenizer"),
    )


def _hunyuan() -> Any:
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
        transformer=transformer, vae=_video_autoencoder("AutoencoderKLHunyuanVideo"), scheduler=_flow(), **_absent(*names)
    )


def _ltx() -> Any:
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
        scheduler=_flow(),
        **_absent("text_encoder", "tokenizer"),
    )


def _cogvideox() -> Any:
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
        **_absent("text_encoder", "tokenizer"),
    )


def _frames(pipe: Any, device: torch.device, generator: torch.Generator, **more: Any) -> torch.Tensor:
    frames: torch.Tensor = pipe(
        prompt_embeds=_numbers(device, 1, TOKENS, WIDTH),
        generator=generator,
        output_type="pt",
        **{"height": 16, "width": 16, "num_inference_steps": 2, **more},
    ).frames
    return frames


def _negative(device: torch.device) -> dict[str, Any]:
    return {"negative_prompt_embeds": _numbers(device, 1, TOKENS, WIDTH, seed=5), "guidance_scale": 5.0}


def _call_wan(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return _frames(pipe, device, generator, num_frames=5, num_inference_steps=3, **_negative(device))


def _call_hunyuan(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    more = {"pooled_prompt_embeds": _numbers(device, 1, WIDTH, seed=4), "prompt_attention_mask": torch.ones(1, TOKENS, device=device)}
    return _frames(pipe, device, generator, num_frames=5, **more)


def _call_ltx(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    mask = torch.ones(1, TOKENS, device=device)
    masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
    return _frames(pipe, device, generator, num_frames=9, height=32, width=32, **masks, **_negative(device))


def _call_cogvideox(pipe: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    return _frames(pipe, device, generator, num_frames=8, max_sequence_length=TOKENS, **_negative(device))


ALL = (
    Pipeline("flux", _flux, _call_flux),
    Pipeline("flux-controlnet", lambda: _flux_controlnet(1), _call_flux_controlnet, ("transformer", "controlnet")),
    Pipeline("flux-multicontrolnet", lambda: _flux_controlnet(2), _call_flux_controlnet),
    Pipeline("sd3", _sd3, _call_sd3),
    Pipeline("sdxl", _sdxl, _call_sdxl, ("unet",)),
    Pipeline("sdxl-controlnet", lambda: _sdxl_controlnet(1), _call_sdxl_controlnet, ("unet",)),
    Pipeline("sdxl-multicontrolnet", lambda: _sdxl_controlnet(2), _call_sdxl_controlnet, ("unet", "controlnet")),
    Pipeline("qwen-image", _qwen, _call_qwen),
    Pipeline("wan", _wan, _call_wan, ("transformer", "transformer_2")),
    Pipeline("hunyuan-video", _hunyuan, _call_hunyuan),
    Pipeline("ltx", _ltx, _call_ltx),
    Pipeline("cogvideox", _cogvideox, _call_cogvideox),
)
NAMED = {one.name: one for one in ALL}
