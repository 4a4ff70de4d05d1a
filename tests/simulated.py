"""The setting in which cells of the matrix run on the simulated accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import sim
from tests.cells import Mode, Setting


def enable(model: nn.Module, device: torch.device, mode: Mode, **more: Any) -> None:
    """`apply_group_offloading` as a user calls it, on a release that may not know the simulated device."""
    from diffusers.hooks import apply_group_offloading

    with sim.xpu_shim():
        apply_group_offloading(model, onload_device=device, **{**mode.arguments, **more})


def setting(index: int = 0) -> Setting:
    """Cells on one of the two simulated devices."""
    device = torch.device("npu", index)
    return Setting(
        device=device,
        enable=enable,
        live_bytes=lambda: int(torch.get_device_module("npu").memory_allocated(device)),
        pinned_bytes=lambda: sim.counters()["pinned_bytes"],
        around=sim.xpu_shim,
    )
