"""What is kept on the device between the forwards of a loop, and that nothing of it can make a number wrong."""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import pytest
import torch

from diffusers_offload_fix import idle, lane, slots
from tests import sim
from tests.kinds import contract
from tests.pairs import SORTS, Pair, every, forward, live_bytes

WAYS = ("block+stream", "leaf+stream+record", "block+stream+low")


def bar(*steps: Any, **config: Any) -> Any:
    """A pipeline's progress bar."""
    from diffusers import DiffusionPipeline

    holder: Any = types.SimpleNamespace(_progress_bar_config={"disable": True, **config})
    return DiffusionPipeline.progress_bar(holder, *steps, total=None if steps else 3)


def equal(pair: Pair) -> bool:
    return torch.equal(forward(pair.model, pair.example), forward(pair.resident, pair.example))


@every(("name", SORTS), ("way", WAYS))
def test_a_loop_keeps_slots_and_gives_them_back(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    pair.check(2)
    with bar():
        for _ in range(3):
            assert equal(pair)
            assert contract.leaves_off(pair.model, "cpu") == []
        assert live_bytes(npu) > pair.before
    assert live_bytes(npu) <= pair.before
    pair.check(1)


@every(("name", SORTS), ("way", WAYS))
@pytest.mark.parametrize("small", [0, 2**30], ids=["slots", "small"])
def test_a_weight_that_changes_in_a_loop_is_copied_again(
    small: int, name: str, way: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "SMALL", small)
    monkeypatch.setattr(slots.Allowance, "TOTAL", 2**30)
    pair = Pair(name, way, npu)
    with idle.loop(), torch.no_grad():
        for turn in range(6):
            assert equal(pair)
            for net in (pair.model, pair.resident):
                for block in (net.blocks[0], net.blocks[-1]):
                    for parameter in block.parameters():
                        for _, leaf in contract.leaves(parameter):
                            if leaf.is_floating_point() and turn % 2:
                                leaf.mul_(0.5)
                if turn == 4:
                    net.blocks[0].norm.weight.data = net.blocks[0].norm.weight.data * 2
        assert equal(pair)
    pair.check(1)


def test_a_change_through_data_between_calls_by_hand_counts(npu: torch.device) -> None:
    """It leaves no trace, so nothing may have been copied ahead: an adapter is fused like this."""
    pair = Pair("plain-bfloat16", "block+stream", npu)
    for _ in range(4):
        assert equal(pair)
        for net in (pair.model, pair.resident):
            net.blocks[0].norm.weight.data.mul_(0.5)
            net.proj_in.weight.data.add_(0.25)


def test_a_loop_that_pauses_gives_back(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "PAUSE", 0.05)
    pair = Pair("plain-bfloat16", "block+stream+low", npu)
    with idle.loop():
        forward(pair.model, pair.example)
        forward(pair.model, pair.example)
        deadline = time.monotonic() + 20
        while live_bytes(npu) > pair.before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert live_bytes(npu) <= pair.before
        while any(t.name.startswith("offload") for t in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(t.name.startswith("offload") for t in threading.enumerate())
        assert equal(pair)


def test_another_model_has_the_room(npu: torch.device) -> None:
    one, other = Pair("plain-bfloat16", "block+stream", npu), Pair("plain-bfloat16", "block+stream", npu)
    with idle.loop():
        for _ in range(2):
            forward(one.model, one.example)
        before = live_bytes(npu)
        for _ in range(2):
            forward(other.model, other.example)
        assert live_bytes(npu) <= before
        assert equal(one) and equal(other)


def test_a_loop_belongs_to_its_thread(npu: torch.device) -> None:
    found: list[bool] = []
    with idle.loop():
        thread = threading.Thread(target=lambda: found.append(idle.in_loop()))
        thread.start()
        thread.join()
        assert idle.in_loop()
    assert found == [False] and not idle.in_loop()


def test_a_bar_that_is_let_go_of_ends_its_loop() -> None:
    open_bar = bar()
    assert idle.in_loop()
    open_bar.close()
    assert not idle.in_loop()
    open_bar.close()
    for _ in bar([1, 2], disable=False, leave=False):
        assert idle.in_loop()
    assert not idle.in_loop()
    lost = bar()
    assert idle.in_loop()
    del lost
    assert not idle.in_loop()


@every(("name", SORTS))
def test_a_forward_that_raises_ends_what_was_kept(name: str, npu: torch.device) -> None:
    pair = Pair(name, "block+stream", npu)
    with idle.loop():
        assert equal(pair) and equal(pair)
        pair.model.fail_at = 2
        with pytest.raises(RuntimeError, match="told to fail"):
            forward(pair.model, pair.example)
        pair.model.fail_at = None
        assert live_bytes(npu) <= pair.before
        assert equal(pair)
    assert sim.hazards() == []
