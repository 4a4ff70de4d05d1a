"""Tiny pipelines of real diffusers classes: how each is built, and one call of it."""

from __future__ import annotations

from . import images, videos
from .parts import Pipeline, modules

__all__ = ["ALL", "NAMED", "Pipeline", "modules"]

ALL = (
    Pipeline("flux", images.flux, images.call_flux),
    Pipeline("flux-controlnet", lambda: images.flux_controlnet(1), images.call_flux_controlnet, ("transformer", "controlnet")),
    Pipeline("flux-multicontrolnet", lambda: images.flux_controlnet(2), images.call_flux_controlnet),
    Pipeline("sd3", images.sd3, images.call_sd3),
    Pipeline("sdxl", images.sdxl, images.call_sdxl, ("unet",)),
    Pipeline("sdxl-controlnet", lambda: images.sdxl_controlnet(1), images.call_sdxl_controlnet, ("unet",)),
    Pipeline("sdxl-multicontrolnet", lambda: images.sdxl_controlnet(2), images.call_sdxl_controlnet, ("unet", "controlnet")),
    Pipeline("qwen-image", videos.qwen, videos.call_qwen),
    Pipeline("wan", videos.wan, videos.call_wan, ("transformer", "transformer_2")),
    Pipeline("hunyuan-video", videos.hunyuan, videos.call_hunyuan),
    Pipeline("ltx", videos.ltx, videos.call_ltx),
    Pipeline("cogvideox", videos.cogvideox, videos.call_cogvideox),
)
NAMED = {one.name: one for one in ALL}
