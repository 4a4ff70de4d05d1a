"""Tiny pipelines for the tests, and the simulated accelerator for the processes of `check`."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import torch

from diffusers_offload_fix.check import pipeline
from tests import sim

build = pipeline.build
call = pipeline.call
WEIGHTS = ("plain", "torchao-int8", "quanto-qint8")


def load_simulated() -> None:
    """The prelude of `check` on the simulated accelerator."""
    sim.load()
    # torch.cuda tells of pinned memory by this name.
    torch.get_device_module("npu").host_memory_stats = lambda: {"active_bytes.current": sim.counters()["pinned_bytes"]}
    # Older releases have to be shown other devices, but only after everything has been imported.
    importlib.import_module("optimum.quanto")
    import diffusers

    mixin = importlib.import_module("diffusers.models.modeling_utils").ModelMixin
    mixin.enable_group_offload = sim.xpu_shim()(mixin.enable_group_offload)
    if diffusers.__version__.startswith("0.33"):
        diffusers.FluxPipeline.__call__ = sim.xpu_shim()(diffusers.FluxPipeline.__call__)


def without_quanto() -> None:
    """A prelude that makes quanto look as if it were not installed."""
    sys.modules["optimum.quanto"] = None  # type: ignore[assignment]


def troubled() -> None:
    """A prelude under which torchao crashes the process and quanto hangs."""
    quantise = pipeline.quantise

    def trouble(model: torch.nn.Module, weights: str) -> None:
        if weights == "torchao-int8":
            os.abort()
        if weights == "quanto-qint8":
            time.sleep(600)
        quantise(model, weights)

    pipeline.quantise = trouble


def resident(weights: str, device: torch.device, passes: int = 2) -> list[torch.Tensor]:
    """The images of a pipeline that is wholly on the device."""
    pipe = build(weights)
    pipe.transformer.to(device)
    pipe.vae.to(device)
    return [call(pipe, device, seed) for seed in range(passes)]


def offloaded(weights: str, device: torch.device, **options: Any) -> Any:
    """A pipeline whose transformer is group-offloaded."""
    pipe = build(weights)
    pipe.vae.to(device)
    with sim.xpu_shim():
        pipe.transformer.enable_group_offload(device, **options)
    return pipe
