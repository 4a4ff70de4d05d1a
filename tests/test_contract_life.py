"""From enabling to the end: parts called by themselves, failures, several models, hooks removed, models let go of."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from tests import cells, sim, simulated
from tests.kinds import contract
from tests.kinds.models import Interrupted
from tests.pairs import SORTS, WAYS, Pair, every, forward, live_bytes, make
from tests.test_contract import EDITS


@every(("name", SORTS), ("way", WAYS))
def test_an_edit_right_after_a_failure_counts(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    pair.check(2)
    for index in (0, 2):
        pair.model.fail_at = index
        with pytest.raises(Interrupted):
            forward(pair.model, pair.example)
        EDITS["leaves"](pair.model, make(name, seed=1 + index))
        pair.model.fail_at = None
        reference = make(name)
        EDITS["leaves"](reference, make(name, seed=1 + index))
        pair.expect(reference)
        pair.check()


@every(("name", SORTS), ("way", WAYS))
def test_a_block_that_is_called_by_itself(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    for passes in (0, 2):
        pair.check(passes)
        for index in (1, 0, 3, 3):
            wanted = forward(pair.resident.blocks[index], pair.example)
            got = forward(pair.model.blocks[index], pair.example)
            assert torch.equal(got, wanted)
            assert contract.leaves_off(pair.model, "cpu") == []
        del wanted, got
        pair.check(1)


@every(("name", SORTS), ("way", WAYS))
def test_a_block_that_is_called_by_itself_leaves_little_on_the_device(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    pair.check(2)
    tensors = [*pair.model.parameters(), *pair.model.buffers()]
    weights = sum(leaf.nbytes for tensor in tensors for _, leaf in contract.leaves(tensor))
    for index in (1, 0, 3):
        forward(pair.model.blocks[index], pair.example)
        # What comes next cannot be known, so room for two groups may be held until the next forward ends.
        assert live_bytes(npu) <= pair.before + weights // 2
    pair.check(1)


@every(("name", SORTS), ("way", WAYS))
def test_a_model_that_is_let_go_of_while_something_is_copied(name: str, way: str, npu: torch.device) -> None:
    for passes in (0, 2):
        pair: Any = Pair(name, way, npu)
        pair.check(passes)
        for index in (1, 0, 3, 3, 3):
            forward(pair.model.blocks[index], pair.example)
        before = pair.before
        kept = pair.resident
        del pair
        deadline = time.monotonic() + 5
        while live_bytes(npu) > before and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread that stages weights may be at its last copy
        assert live_bytes(npu) <= before
        found = sim.hazards()
        sim.reset_hazards()
        assert found == []
        del kept


@every(("name", SORTS), ("way", WAYS))
def test_requires_grad_may_change(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    for wanted in (True, False, True):
        for parameter in pair.model.parameters():
            parameter.requires_grad_(wanted and parameter.is_floating_point())
        pair.check(1)
        assert all(p.requires_grad == wanted for p in pair.model.parameters() if p.is_floating_point())


@every(("name", SORTS), ("way", WAYS))
def test_two_models_take_turns(name: str, way: str, npu: torch.device) -> None:
    one, other = Pair(name, way, npu), Pair(SORTS[0], "block+stream", npu)
    # Each counts the other's resident model among what is there before.
    one.before = other.before = live_bytes(npu)
    for _ in range(3):
        one.check(1)
        other.check(1)


@every(("name", SORTS), ("way", WAYS))
def test_without_its_hooks_a_model_is_ordinary_again(name: str, way: str, npu: torch.device) -> None:
    from diffusers.hooks import HookRegistry

    pair = Pair(name, way, npu)
    pair.check()
    HookRegistry.check_if_exists_or_initialize(pair.model).remove_hook("group_offloading", recurse=True)
    assert contract.leaves_off(pair.model, "cpu") == []
    assert contract.same_state_dict_bytes(pair.model.state_dict(), make(name).state_dict()) == []
    for hook in ("lazy_prefetch_group_offloading", "layer_execution_tracker"):
        HookRegistry.check_if_exists_or_initialize(pair.model).remove_hook(hook, recurse=True)
    if name == SORTS[0]:
        pair.model.to(npu)
        assert torch.equal(forward(pair.model, pair.example), forward(pair.resident, pair.example))


@every(("name", SORTS), ("way", WAYS))
def test_a_model_that_is_let_go_of_leaves_no_memory(name: str, way: str, npu: torch.device) -> None:
    pair: Any = Pair(name, way, npu)
    before = pair.before
    pair.check()
    kept = pair.resident
    del pair
    assert live_bytes(npu) <= before
    gc.collect()
    assert sim.counters()["pinned_bytes"] == 0
    del kept


@every(("name", SORTS))
def test_the_state_outlives_the_model(name: str, npu: torch.device) -> None:
    model = make(name)
    simulated.enable(model, npu, cells.MODES["block+stream"])
    state = model.state_dict()
    del model
    gc.collect()
    assert contract.same_state_dict_bytes(state, make(name).state_dict()) == []
