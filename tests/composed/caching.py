"""A Flux transformer with a cache, offloading and a LoRA, enabled in any order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from . import models

#: Calls of the model in one loop; the inputs change once.
STEPS = 6

_now = [0.0]


def configs() -> dict[str, Callable[[], Any]]:
    """Every cache that the installed release has and that works without further models, by name."""
    from diffusers import hooks

    shared = {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_block_identifiers": ("blocks", "transformer_blocks"),
        "current_timestep_callback": lambda: _now[0],
    }
    arguments: dict[str, dict[str, Any]] = {
        "FirstBlockCacheConfig": {"threshold": 0.5},
        "PyramidAttentionBroadcastConfig": {"spatial_attention_timestep_skip_range": (100, 800), **shared},
        "FasterCacheConfig": {"spatial_attention_timestep_skip_range": (-1, 750), "is_guidance_distilled": True, **shared},
        "MagCacheConfig": {"num_inference_steps": STEPS, "retention_ratio": 0.1, "threshold": 1.0, "mag_ratios": [1.0] * STEPS},
        "TaylorSeerCacheConfig": {"cache_interval": 3, "disable_cache_before_step": 2, "max_order": 1},
    }
    arguments["FasterCacheConfig"] |= {"unconditional_batch_skip_range": 5, "tensor_format": "BCHW"}
    known = {name: getattr(hooks, name, None) for name in arguments}
    return {name.removesuffix("Config"): _maker(kind, arguments[name]) for name, kind in known.items() if kind is not None}


def _maker(kind: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: kind(**arguments)


def loop(model: Any, device: torch.device, after: Callable[[], Any] = lambda: None) -> tuple[list[torch.Tensor], list[Any]]:
    """The outputs of one denoising loop, no two of which are equal without a cache, and what `after` returns after each step."""
    outputs, notes = [], []
    for step in range(STEPS):
        _now[0] = 900.0 - 100 * step
        inputs = models.flux_inputs(device, int(step > 3))
        inputs["timestep"] = inputs["timestep"] + _now[0] / 1000
        # The oldest releases know no contexts.
        context = model.cache_context("cond") if hasattr(model, "cache_context") else contextlib.nullcontext()
        with torch.no_grad(), context:
            outputs.append(model(**inputs, return_dict=False)[0])
        notes.append(after())
    model._reset_stateful_cache()
    return outputs, notes


def add_lora(model: Any) -> None:
    """Loads an adapter as a pipeline does, which removes the hooks of group offloading and puts them back."""
    from diffusers.hooks import group_offloading

    model.load_lora_adapter(models.lora(model, 1), adapter_name="a", prefix="transformer")
    reapply = getattr(group_offloading, "_maybe_remove_and_reapply_group_offloading", None)
    if reapply is not None:
        reapply(model)
