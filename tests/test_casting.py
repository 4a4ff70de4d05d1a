"""Layerwise casting and changes of dtype: the smaller dtype is what is stored and what travels, whatever was enabled first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import cells, sim, simulated
from tests.composed import models

MODES = ("block", "block+stream", "leaf+stream", "leaf+stream+low")


def cast(model: Any, storage: torch.dtype = torch.float8_e4m3fn) -> None:
    model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.bfloat16)


def forward(model: Any, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**models.flux_inputs(device, seed, dtype), return_dict=False)[0]
    return output


def counted(model: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, dict[str, int]]:
    """An output, and what the simulator counted for it."""
    sim.drain()
    sim.reset_counters()
    output = forward(model, device, dtype=dtype)
    sim.drain()
    return output, sim.counters()


def same_bytes(model: Any, other: Any) -> bool:
    mine, others = model.state_dict(), other.state_dict()
    return all(torch.equal(mine[name].cpu().view(torch.uint8), others[name].cpu().view(torch.uint8)) for name in others)


@pytest.mark.parametrize("order", ["cast offload", "offload cast", "offload run cast"])
@pytest.mark.parametrize("mode", MODES)
def test_the_smaller_dtype_travels(order: str, mode: str, npu: torch.device) -> None:
    resident, model = models.flux().to(npu), models.flux()
    for what in order.split():
        if what == "offload":
            simulated.enable(model, npu, cells.MODES[mode])
        for net in (resident, model):
            if what == "cast":
                cast(net)
            elif what == "run":
                forward(net, npu)
    for index in range(3):
        wanted = forward(resident, npu)
        output, count = counted(model, npu)
        assert torch.equal(output, wanted)
        assert count["d2h_bytes"] == 0
        # The first forward after a change may have been preceded by a copy of the old weights.
        if index:
            inputs = sum(value.nbytes for value in models.flux_inputs(npu).values())
            padding = 256 * len(list(model.parameters()))
            assert count["h2d_bytes"] <= sum(p.nbytes for p in model.parameters()) + padding + inputs
    assert same_bytes(model, resident)
    assert any(p.dtype == torch.float8_e4m3fn for p in model.parameters())


@pytest.mark.parametrize("mode", ["block+stream", "leaf"])
def test_a_cast_that_loses_bits_loses_the_same_bits(mode: str, npu: torch.device) -> None:
    resident, model = models.flux().to(npu), models.flux()
    simulated.enable(model, npu, cells.MODES[mode])
    for net in (resident, model):
        cast(net, torch.float16)
    for index in range(2):
        assert torch.equal(forward(model, npu, index), forward(resident, npu, index))
        assert same_bytes(model, resident)


@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.float, lambda net: net.to(torch.float64)])
@pytest.mark.parametrize("mode", MODES)
def test_a_change_of_dtype_is_kept(change: Callable[[Any], Any], mode: str, npu: torch.device) -> None:
    resident, model = models.flux().to(npu), models.flux()
    simulated.enable(model, npu, cells.MODES[mode])
    forward(model, npu)
    for net in (resident, model):
        change(net)
    dtype = resident.proj_out.weight.dtype
    forward(model, npu, dtype=dtype)
    output, count = counted(model, npu, dtype)
    assert output.dtype == dtype and torch.equal(output, forward(resident, npu, dtype=dtype))
    assert all(p.dtype == dtype and p.device.type == "cpu" for p in model.parameters())
    assert count["d2h_bytes"] == 0
