"""Enabling more than once: the last call counts, and a call that cannot be carried out changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import diffusers_offload_fix  # noqa: F401
from diffusers_offload_fix import disable_group_offload
from diffusers_offload_fix.groups import group_hooks, state_of
from diffusers_offload_fix.unhook import hooks_below
from tests import cells, sim, simulated
from tests.kinds import KINDS, contract
from tests.pairs import SORTS, Pair, every, forward, live_bytes, make

MODES = cells.MODES
#: From one configuration to another: with and without streams, block and leaf, a larger group, less host memory.
CHANGES = (
    ("block", "block+stream"),
    ("block+stream", "block"),
    ("block", "leaf"),
    ("leaf+stream", "block+stream+low"),
    ("block+stream+low", "block+stream"),
    ("block2", "leaf+stream+record"),
)


def described(model: nn.Module) -> set[tuple[Any, ...]]:
    """What the hooks say of each group: how many modules it has, where it goes, whether it streams and pins."""
    found = set()
    for hook in hooks_below(model):
        state = state_of(hook.group)
        assert state is not None
        found.add((len(state.modules), state.device, state.stream is not None, state.low_cpu_mem_usage))
    return found


def wanted(name: str, mode: str, device: torch.device) -> set[tuple[Any, ...]]:
    """The same of a model that was only offloaded once."""
    model = make(name)
    simulated.enable(model, device, MODES[mode])
    return described(model)


@every(("name", SORTS))
@pytest.mark.parametrize(("first", "second"), CHANGES)
@pytest.mark.parametrize("passes", [0, 1])
def test_the_last_call_counts(passes: int, first: str, second: str, name: str, npu: torch.device) -> None:
    pair = Pair(name, first, npu)
    ids = contract.snapshot_ids(pair.model)
    pair.check(passes)
    simulated.enable(pair.model, npu, MODES[second])
    assert described(pair.model) == wanted(name, second, npu)
    pair.check()
    assert contract.snapshot_ids(pair.model) == ids
    if second == "block" or MODES[second].low:
        # The pinned memory of the first configuration is given back.
        tensors = [*pair.model.parameters(), *pair.model.buffers()]
        assert not any(leaf.is_pinned() for tensor in tensors for _, leaf in contract.leaves(tensor))


@every(("name", SORTS[:2]))
def test_the_last_call_says_which_device(name: str, npu: torch.device) -> None:
    pair = Pair(name, "block+stream", npu)
    pair.check()
    other = torch.device("npu", 1)
    simulated.enable(pair.model, other, MODES["block+stream"])
    with torch.no_grad():
        output = pair.model(pair.example.to(other))
    assert output.device == other
    assert torch.equal(output.cpu(), forward(pair.resident, pair.example).cpu())
    assert live_bytes(npu) <= pair.before


@every(("name", SORTS[:2]))
def test_a_part_that_was_offloaded_by_itself_follows_the_whole(name: str, npu: torch.device) -> None:
    pair = Pair(name, "block", npu)
    disable_group_offload(pair.model)
    simulated.enable(pair.model.blocks[1], npu, MODES["leaf+stream"])
    simulated.enable(pair.model, npu, MODES["block"])
    assert described(pair.model) == wanted(name, "block", npu)
    pair.check()
    # And the other way round: only the part changes.
    simulated.enable(pair.model.blocks[1], npu, MODES["leaf"])
    pair.check()
    disable_group_offload(pair.model)
    assert not list(hooks_below(pair.model))


class Unpinned(Exception):
    """Stands for whatever may go wrong while groups are made."""


@every(("name", SORTS[:2]), ("way", ("block", "block+stream", "leaf+stream")))
@pytest.mark.parametrize("is_first", [True, False])
def test_a_call_that_fails_half_way_changes_nothing(
    is_first: bool, way: str, name: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers_offload_fix import unit

    pair = Pair(name, "block+stream", npu)
    before = contract.fingerprint(pair.model)
    if is_first:
        disable_group_offload(pair.model)
    real, count = unit.Unit.settle, [0]

    def failing(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise Unpinned
        return real(*args)

    monkeypatch.setattr(unit.Unit, "settle", failing)
    with pytest.raises(Unpinned):
        simulated.enable(pair.model, npu, MODES[way])
    monkeypatch.setattr(unit.Unit, "settle", real)
    assert contract.diff(before, contract.fingerprint(pair.model)) == []
    if is_first:
        assert not list(hooks_below(pair.model))
        assert sim.counters()["pinned_bytes"] == 0
        assert torch.equal(forward(pair.model.to(npu), pair.example), forward(pair.resident, pair.example))
    else:
        assert described(pair.model) == wanted(name, "block+stream", npu)
        pair.check()


def test_a_call_that_makes_no_sense_leaves_what_was_there(npu: torch.device) -> None:
    pair = Pair(SORTS[0], "block+stream", npu)
    senseless: tuple[dict[str, Any], ...] = ({"offload_type": "block_level"}, {"offload_type": "rows"})
    for arguments in senseless:
        with pytest.raises((ValueError, TypeError)):
            simulated.enable(pair.model, npu, cells.Mode("senseless", arguments))
        assert described(pair.model) == wanted(SORTS[0], "block+stream", npu)
    pair.check()


def test_hooks_are_where_upstream_looks_for_them(npu: torch.device) -> None:
    from diffusers.hooks.group_offloading import _get_group_onload_device, _is_group_offload_enabled

    model = KINDS[SORTS[0]].build()[0]
    for way in ("block", "block+stream", "leaf+stream"):
        simulated.enable(model, npu, MODES[way])
        assert _is_group_offload_enabled(model)
        assert _get_group_onload_device(model) == npu
        assert group_hooks(model) is not None
    disable_group_offload(model)
    assert not _is_group_offload_enabled(model)
