"""One pipeline in one mode, compared bit for bit with the resident one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.kinds import contract

from .builders import Pipeline, modules

MODES: dict[str, dict[str, Any]] = {
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "block+stream": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    "block+stream+low": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True, "low_cpu_mem_usage": True},
    "leaf": {"offload_type": "leaf_level"},
    "leaf+stream": {"offload_type": "leaf_level", "use_stream": True},
}


@dataclass
class Place:
    """A device, how many bytes live there, and what older releases need to see it."""

    device: torch.device
    live_bytes: Callable[[], int]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass
class Expected:
    """What the resident pipeline makes.

    Attributes:
        kept: bytes that it keeps on the device beside its weights: a scheduler's steps.
        left: bytes that outlive it, because diffusers caches them by itself.
    """

    outputs: list[torch.Tensor]
    kept: int
    left: int


def resident(pipeline: Pipeline, weights: str, place: Place, calls: int = 2) -> Expected:
    """The pipeline when it is wholly on the device."""
    gc.collect()
    start = place.live_bytes()
    pipe = pipeline.build(weights)
    for module in modules(pipe).values():
        torch.nn.Module.to(module, place.device)
    gc.collect()
    before = place.live_bytes()
    outputs = [pipeline.run(pipe, place.device, seed) for seed in range(calls)]
    gc.collect()
    kept = place.live_bytes() - before
    del pipe, module
    gc.collect()
    return Expected(outputs, kept, place.live_bytes() - start)


def enable(pipe: Any, device: torch.device, **options: Any) -> None:
    """`pipe.enable_group_offload`, or the same one by one where a release has no such method."""
    if hasattr(pipe, "enable_group_offload"):
        pipe.enable_group_offload(device, **options)
        return
    from diffusers.hooks import apply_group_offloading

    for module in modules(pipe).values():
        apply_group_offloading(module, onload_device=device, **options)


def left_on_device(module: torch.nn.Module) -> list[str]:
    """Parameters and buffers that are not on the host, or do not say so. What a model keeps in plain attributes is counted in bytes."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    parts = {name: [tensor, *(leaf for _, leaf in contract.leaves(tensor))] for name, tensor in tensors}
    return [name for name, found in parts.items() if any(part.device.type != "cpu" for part in found)]


def faults(pipeline: Pipeline, weights: str, mode: str, place: Place, expected: Expected) -> list[str]:
    """What is wrong with the offloaded pipeline; empty if nothing is."""
    gc.collect()
    before = place.live_bytes()
    pipe = pipeline.build(weights)
    found = []
    with place.around():
        enable(pipe, place.device, **MODES[mode])
        for seed, wanted in enumerate(expected.outputs):
            got = pipeline.run(pipe, place.device, seed)
            if not torch.equal(got, wanted):
                worst = (got.float() - wanted.float()).abs().max().item()
                found.append(f"call {seed + 1}: the output differs by {worst:.3g}")
            for name, module in modules(pipe).items():
                found += [f"call {seed + 1}: {name}.{text} is not on the host" for text in left_on_device(module)[:1]]
    gc.collect()
    extra = place.live_bytes() - before - expected.kept
    if extra > 0:
        found.append(f"{extra} bytes of device memory are kept")
    del pipe, module
    gc.collect()
    extra = place.live_bytes() - before - expected.left
    if extra > 0:
        found.append(f"{extra} bytes of device memory outlive the pipeline")
    return found[:6]
