"""A group-offloaded model beside the same model that is wholly on the device: what the tests of the contract work with."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import diffusers_offload_fix  # noqa: F401
from tests import cells, sim, simulated
from tests.kinds import KINDS, contract

#: One kind of each sort: dense, a library's wrapper, another library's, and nested ones that belong to none.
SORTS = ("plain-bfloat16", "torchao-int8wo", "quanto-qint8", "own-nested")
WRAPPERS = SORTS[1:]
#: Modes whose bytes take different ways.
WAYS = ("block", "block+stream", "leaf+stream+record", "block+stream+low")


def every(*axes: tuple[str, tuple[str, ...]]) -> Any:
    """Parametrises a test over all combinations of the axes."""

    def apply(test: Any) -> Any:
        for name, values in reversed(axes):
            test = pytest.mark.parametrize(name, values)(test)
        return test

    return apply


def require(name: str, device: torch.device | str = "cpu") -> None:
    """Skips where the kind does not run on the device even without offloading."""
    reason = KINDS[name].runs(device)
    if reason is not None:
        pytest.skip(reason)


def live_bytes(device: torch.device) -> int:
    gc.collect()
    return int(torch.get_device_module("npu").memory_allocated(device))


def make(name: str, seed: int = 0) -> Any:
    """A model of the kind on the CPU; another seed gives other weights."""
    return KINDS[name].build(seed=seed)[0]


def forward(model: nn.Module, example: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(example)
    return output


class Pair:
    """An offloaded model, the resident one, and an input on the device."""

    def __init__(self, name: str, way: str, device: torch.device) -> None:
        require(name, device)
        self.name, self.device = name, device
        self.mode = cells.mode_of(way)
        self.resident, example = KINDS[name].resident(device)
        self.example = example.to(device)
        forward(self.resident, self.example)
        self.model = make(name)
        self.before = live_bytes(device)
        simulated.enable(self.model, device, self.mode)

    def check(self, passes: int = 2) -> None:
        """Both compute the same, and afterwards nothing of the offloaded one is on the device."""
        for _ in range(passes):
            wanted = forward(self.resident, self.example)
            assert torch.equal(forward(self.model, self.example), wanted)
            assert contract.leaves_off(self.model, "cpu") == []
            del wanted
        assert live_bytes(self.device) <= self.before
        found = sim.hazards()
        sim.reset_hazards()
        assert found == []

    def expect(self, reference: nn.Module) -> None:
        """Compares with another model from now on; it is on the CPU and is moved."""
        self.resident = reference.to(self.device)
        forward(self.resident, self.example)
        self.before = live_bytes(self.device)


def checked_for_what_is_kept(name: str, way: str, device: torch.device) -> Pair:
    """A pair whose offloaded model is saved and copied like the model that was never offloaded, before and after forwards."""
    require(name)
    wanted = contract.persistence(make(name))
    pair = Pair(name, way, device)
    for passes in (0, 2):
        pair.check(passes)
        found = contract.persistence(pair.model)
        for operation in ("state_dict", "detach", "pickle", "torch.save"):
            assert found[operation] == wanted[operation], operation
    return pair
