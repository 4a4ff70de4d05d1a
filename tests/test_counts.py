"""What a forward in a loop makes the host and the device do: one copy a group, no wait of the host, no memory for weights."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from diffusers_offload_fix import idle, lane, unit
from diffusers_offload_fix.bench import build, counts, targets
from tests import sim
from tests.pairs import SORTS, Pair, every

KEYS = ("h2d", "d2h", "host_syncs", "allocations")


def counted(model: torch.nn.Module, example: torch.Tensor) -> dict[str, int]:
    """The figures of one forward."""
    sim.reset_counters()
    with torch.no_grad():
        model(example)
    found = sim.counters()
    return {name: found[name] for name in KEYS}


def steady(name: str, way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, dict[str, int]]:
    """What offloading adds to the fourth forward of a loop."""
    # Every group goes through the slots, however small.
    monkeypatch.setattr(lane, "SMALL", 0)
    pair = Pair(name, way, device)
    with idle.loop():
        for _ in range(3):
            counted(pair.model, pair.example)
        ours, own = counted(pair.model, pair.example), counted(pair.resident, pair.example)
    return pair, {name: ours[name] - own[name] for name in KEYS}


@every(("name", SORTS))
def test_block_level_makes_one_copy_a_group(name: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, added = steady(name, "block+stream", npu, monkeypatch)
    groups = counts.groups(pair.model)["groups"]
    assert groups == len(pair.model.blocks) + 1
    # The group around the blocks may stay for the next forward of a loop.
    assert groups - 1 <= added["h2d"] <= groups
    assert added["d2h"] == 0


@every(("name", SORTS))
def test_leaf_level_makes_no_more_than_one_copy_a_group(name: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, added = steady(name, "leaf+stream", npu, monkeypatch)
    pieces = math.ceil(build.weight_bytes(pair.model) / targets.PIECE)
    assert 0 < added["h2d"] <= max(counts.groups(pair.model)["groups"], pieces)
    assert added["d2h"] == 0


@every(("name", SORTS), ("way", ("block+stream", "leaf+stream")))
def test_the_host_never_waits(name: str, way: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, added = steady(name, way, npu, monkeypatch)
    assert added["host_syncs"] == 0


@every(("name", SORTS), ("way", ("block+stream", "leaf+stream")))
def test_no_memory_is_allocated_for_weights(name: str, way: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, added = steady(name, way, npu, monkeypatch)
    assert added["allocations"] == 0


@every(("name", SORTS), ("way", ("block+stream", "leaf+stream")))
def test_what_a_group_holds_is_looked_at_once_a_forward(
    name: str, way: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, _ = steady(name, way, npu, monkeypatch)
    looks = collections.Counter[int]()
    real = unit.Unit.intact

    def intact(self: unit.Unit) -> bool:
        looks[id(self)] += 1
        return real(self)

    monkeypatch.setattr(unit.Unit, "intact", intact)
    counted(pair.model, pair.example)
    assert looks and set(looks.values()) == {1}
