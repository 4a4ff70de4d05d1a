"""Random orders, tiny slots and random delays on both streams: the output stays the resident model's, bit for bit."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

import diffusers_offload_fix  # noqa: F401
from tests import sim, stress

chance = random.Random(1)


def pause() -> None:
    """Holds up the calling thread; what is queued on a simulated stream is late by itself."""
    if chance.random() < 0.3:
        time.sleep(chance.random() * 3e-4)


def enable(model: torch.nn.Module, device: torch.device, **arguments: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    with sim.xpu_shim():
        apply_group_offloading(model, onload_device=device, **arguments)


@pytest.mark.parametrize("way", stress.WAYS)
@pytest.mark.parametrize("quant", stress.QUANTS)
def test_random_orders_and_delays(quant: str, way: str, npu: torch.device) -> None:
    with sim.xpu_shim():
        assert stress.run(quant, way, npu, enable, pause, rounds=25) == []
    assert sim.hazards() == []


@pytest.mark.parametrize("way", ["block+stream", "block+stream+low"])
def test_without_ordering_it_would_be_seen(way: str, npu: torch.device) -> None:
    with sim.xpu_shim(), stress.unordered():
        faults = stress.run("none", way, npu, enable, pause, rounds=10)
    hazards = sim.hazards()
    sim.reset_hazards()
    assert faults and hazards
