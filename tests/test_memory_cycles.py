"""Enabling and removing many times, enabling anew, and letting go of a model leave no memory behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import diffusers_offload_fix  # noqa: F401
from diffusers_offload_fix import backend
from tests import sim
from tests.gpu import cycles
from tests.kinds import contract

TIMES = 50
#: A process that only moves such a model back and forth grows as well for some thirty rounds: libraries fill caches of their own.
WARM_UP = 40
MIB = 1 << 20
WIDTH, DEPTH = 512, 4


class _Registrar:
    """Registration on the simulated device, as `cudaHostRegister` on a real one."""

    def register(self, address: int, nbytes: int) -> None:
        torch.get_device_module("npu").host_register(address, nbytes)

    def unregister(self, address: int) -> None:
        torch.get_device_module("npu").host_unregister(address)


@pytest.fixture(params=["registered", "allocated"])
def pinning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "registered":
        monkeypatch.setitem(backend.REGISTRARS, "npu", _Registrar())
    return str(request.param)


def figures(device: torch.device) -> dict[str, int]:
    """Bytes that are pinned, counted by the plugin and by the device, and bytes on the device."""
    cycles.settle(device)
    gc.collect()
    live = torch.get_device_module("npu").memory_allocated(device)
    return {"plugin": backend.pinned_bytes(), "pinned": sim.counters()["pinned_bytes"], "device": int(live)}


def resident_set() -> int:
    """Bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def round_trip(model: Any, device: torch.device, way: str, example: torch.Tensor) -> torch.Tensor:
    """Enables, runs twice, removes; returns the output."""
    cycles.enable(model, device, way)
    with torch.no_grad():
        output: torch.Tensor = [model(example) for _ in range(2)][-1]
    cycles.remove(model)
    return output


@pytest.mark.parametrize("way", cycles.WAYS)
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_twenty_cycles_keep_nothing(quant: str, way: str, pinning: str, npu: torch.device) -> None:
    # A graph whose backward pass raised in another test may still hold its model.
    elsewhere = figures(npu)["pinned"]
    model = cycles.build(WIDTH, DEPTH, quant, torch.device("cpu"))
    example = torch.randn(2, 4, WIDTH, dtype=torch.bfloat16).to(npu)
    with sim.xpu_shim():
        wanted = round_trip(model, npu, way, example)
        for _ in range(WARM_UP):
            round_trip(model, npu, way, example)
        before, resident = figures(npu), resident_set()
        for _ in range(TIMES):
            got = round_trip(model, npu, way, example)
            assert torch.equal(got, wanted)
            del got
        assert contract.leaves_off(model, "cpu") == []
        assert figures(npu) == before
        assert resident_set() - resident < 8 * MIB
        # After a removal a model's weights may stay where they were streamed from, but only once.
        assert (
            before["pinned"] - elsewhere <= 1.05 * sum(leaf.nbytes for p in model.parameters() for _, leaf in contract.leaves(p)) + 4096
        )


@pytest.mark.parametrize("way", cycles.WAYS)
def test_enabling_anew_costs_no_second_copy(way: str, pinning: str, npu: torch.device) -> None:
    model = cycles.build(WIDTH, DEPTH, "none", torch.device("cpu"))
    example = torch.randn(2, 4, WIDTH, dtype=torch.bfloat16).to(npu)
    seen = []
    with sim.xpu_shim():
        for _ in range(5):
            cycles.enable_anew(model, npu, way)
            with torch.no_grad():
                model(example)
            seen.append(figures(npu))
    assert seen[1:] == seen[:1] * 4


@pytest.mark.parametrize("way", cycles.WAYS)
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_model_that_is_let_go_of_gives_everything_back(quant: str, way: str, pinning: str, npu: torch.device) -> None:
    example = torch.randn(2, 4, WIDTH, dtype=torch.bfloat16).to(npu)
    before = figures(npu)
    for used in (False, True):
        model: Any = cycles.build(WIDTH, DEPTH, quant, torch.device("cpu"))
        with sim.xpu_shim():
            cycles.enable(model, npu, way)
            if used:
                with torch.no_grad():
                    model(example)
        assert "low" in way or figures(npu)["pinned"] > before["pinned"]
        del model
        assert figures(npu) == before
