"""What the order of groups predicts: repeats, skips in a rhythm, changes, groups that vanish."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diffusers_offload_fix import order
from diffusers_offload_fix.order import Order


def run(learnt: Order, groups: Sequence[str]) -> int:
    """Runs one forward of a loop, and returns how many groups came unexpected."""
    missed = 0
    learnt.edge()
    for group in groups:
        found = learnt.after(learnt.now, looping=True)
        missed += found is None or found[0] != group
        learnt.enter(group)
    learnt.edge()
    return missed


def test_an_order_that_repeats_is_known_after_one_forward() -> None:
    learnt = Order()
    assert run(learnt, "rabcd") == 5
    assert [run(learnt, "rabcd") for _ in range(5)] == [0] * 5


def test_a_group_that_runs_twice_has_a_successor_for_each_time() -> None:
    learnt = Order()
    for _ in range(order.DEPTH + 1):
        run(learnt, "rabcabd")
    assert run(learnt, "rabcabd") == 0


@pytest.mark.parametrize("rhythm", [("rabcd", "rad"), ("rabcd", "rad", "rad"), ("rabcd", "rad", "rad", "rad"), ("rabc", "rbc", "rac")])
def test_a_rhythm_of_skips_is_learnt(rhythm: tuple[str, ...]) -> None:
    learnt = Order()
    for groups in rhythm * 4:
        run(learnt, groups)
    assert sum(run(learnt, groups) for groups in rhythm * 3) == 0


def test_one_forward_that_differs_is_recovered_from() -> None:
    learnt = Order()
    for _ in range(4):
        run(learnt, "rabcd")
    assert run(learnt, "rad") > 0
    run(learnt, "rabcd")
    for _ in range(order.DEPTH):
        run(learnt, "rabcd")
    assert run(learnt, "rabcd") == 0


def test_a_forward_is_followed_by_the_next_only_in_a_loop() -> None:
    learnt = Order()
    for _ in range(2):
        run(learnt, "ab")
    learnt.enter("a")
    learnt.enter("b")
    assert learnt.after(learnt.now) is None and learnt.ended()
    found = learnt.after(learnt.now, looping=True)
    assert found is not None and found[0] == "a"


def test_a_group_that_is_gone_is_never_expected() -> None:
    learnt = Order()
    for _ in range(3):
        run(learnt, "rabcd")
    learnt.forget("b")
    for group in "ra":
        learnt.enter(group)
    found = learnt.after(learnt.now)
    assert found is None or found[0] != "b"


def test_rules_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "RULES", 8)
    learnt = Order()
    for _ in range(5):
        run(learnt, "rabcdefgh")
        assert len(learnt._next) <= 8
    assert run(learnt, "rabcdefgh") == 0
