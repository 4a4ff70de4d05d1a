"""The staging ring by itself: what is filled ahead, what is refused, what fails on the way, and that no buffer is lost."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import diffusers_offload_fix  # noqa: F401
from diffusers_offload_fix import backend, sending, staging
from diffusers_offload_fix.homes import Home, Keep, make_home
from diffusers_offload_fix.sending import Load, Sending
from tests import sim

CHUNK = 1024
CPU = torch.device("cpu")


@pytest.fixture
def ring(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(staging, "CHUNK", CHUNK)
    with sim.xpu_shim():
        made = staging.Ring(1 << 20, backend.Streams(npu), threads=2)
        yield made
        made.close()


def home(pieces: int, seed: int = 0, packs: bool = False) -> Home:
    """A home of that many pieces; with `packs` one whose leaf is laid out anew on arrival."""
    leaf = torch.randn(pieces * CHUNK // 4, generator=torch.Generator().manual_seed(seed))
    if packs:
        leaf = leaf.reshape(-1, 4).t()
    return make_home([leaf], torch.device("npu:0"), CPU, Keep.SLAB, [packs])


def room(of: Home) -> torch.Tensor:
    memory = torch.zeros(of.layout.device_nbytes, dtype=torch.uint8, device="npu:0")
    torch.npu.synchronize()
    return memory


def arrived(one: Sending, of: Home, memory: torch.Tensor) -> bool:
    """Whether the bytes are there after the event, and for a leaf that is laid out anew, dense."""
    event = one.done.result(timeout=20)
    assert event is not None
    torch.npu.current_stream("npu:0").wait_event(event)
    return torch.equal(of.layout.device_views(memory)[0].cpu(), of.leaves[0])


def send(ring: Any, *arguments: Any) -> Sending:
    """Starts at once what a ring would hold back until more goes with it."""
    one: Sending = ring.send(*arguments)
    ring.flush()
    return one


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def filled(one: Sending, pieces: int) -> None:
    """Waits until that many pieces are in buffers."""
    until(lambda: len(one._filled) >= pieces)


@pytest.mark.parametrize("packs", [False, True])
def test_more_pieces_than_buffers(ring: Any, packs: bool) -> None:
    of = home(50, packs=packs)
    memory = room(of)
    assert arrived(send(ring, of, backend.Streams(torch.device("npu:0")).new(), memory), of, memory)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_what_is_staged_is_sent_when_there_is_room(ring: Any, pieces: int, packs: bool) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    of = home(pieces, packs=packs)
    one = send(ring, of, stream)
    filled(one, min(pieces, ring.ahead))
    before, memory = sim.counters()["h2d"], room(of)
    assert not one.done.done() and sim.counters()["h2d"] == before
    assert one.give(memory, [])
    assert arrived(one, of, memory)


def test_as_much_is_filled_ahead_as_leaves_buffers_for_what_is_on_its_way(ring: Any) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    waiting = send(ring, home(50), stream)
    filled(waiting, ring.ahead)
    time.sleep(0.05)
    assert len(waiting._filled) == ring.ahead == len(ring._buffers) - ring.threads
    waiting.refuse()
    assert waiting.done.result(timeout=20) is None
    assert not waiting.give(room(waiting.home), [])


def test_no_buffer_is_lost(ring: Any) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    for turn in range(30):
        of = home(1 + turn % 9, seed=turn)
        one = send(ring, of, stream)
        if turn % 3 == 1:
            filled(one, 1)
        if turn % 2:
            one.refuse()
            assert one.done.result(timeout=20) is None
        else:
            memory = room(of)
            assert one.give(memory, []) and arrived(one, of, memory)
    assert ring._pool.state == (len(ring._buffers), ring.ahead)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_is_told_once_no_thread_writes_any_more(ring: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    of, memory = home(9), room(home(9))
    real, seen = Home.gather, []

    def gather(self: Home, target: torch.Tensor, start: int) -> None:
        seen.append(start)
        if start == CHUNK:
            raise OSError("the disk is gone")
        real(self, target, start)

    monkeypatch.setattr(Home, "gather", gather)
    # A slab in memory is not gathered, but copied.
    monkeypatch.setattr(sending.Piece, "is_copied", False)
    one = send(ring, of, stream, memory) if when == "after" else send(ring, of, stream)
    if when == "before":
        until(lambda: CHUNK in seen)
        one.give(memory, [])
    with pytest.raises(OSError, match="the disk is gone"):
        one.done.result(timeout=20)
    assert ring._pool.state == (len(ring._buffers), ring.ahead)
    assert one._left == 0
    monkeypatch.setattr(Home, "gather", real)
    assert arrived(send(ring, of, stream, memory), of, memory)


def test_nobody_waits_for_a_device_that_fails(ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of, stream = home(5), backend.Streams(torch.device("npu:0")).new()
    memory = room(of)

    def mark(*_: Any) -> Any:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as lost:
        lost.setattr(backend.Streams, "mark", mark)
        one = send(ring, of, stream, memory)
        with pytest.raises(RuntimeError, match="the device is lost"):
            one.done.result(timeout=20)
    stream.synchronize()
    assert ring._pool.state == (len(ring._buffers), ring.ahead)


def test_a_thread_that_waits_for_room_gives_up(ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PATIENCE", 0.05)
    stream = backend.Streams(torch.device("npu:0")).new()
    waiting = send(ring, home(50), stream)
    assert waiting.done.result(timeout=20) is None
    assert not waiting.give(room(waiting.home), [])


def test_refused_sendings_let_go_of_their_threads(ring: Any) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    sendings = {send(ring, home(50), stream) for _ in range(3)}
    all_of_them = list(sendings)
    staging.refuse_all(sendings)
    assert [one.done.result(timeout=20) for one in all_of_them] == [None] * 3 and not sendings


def small(number: int) -> list[Home]:
    """Homes of which a buffer holds four."""
    return [make_home([torch.full((CHUNK // 16,), float(seed))], torch.device("npu:0"), CPU, Keep.SLAB) for seed in range(number)]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces went together, load by load."""
    found: list[int] = []
    real = Load.run

    def run(load: Load) -> None:
        found.append(len(load._pieces))
        real(load)

    monkeypatch.setattr(Load, "run", run)
    return found


def test_small_homes_go_together(ring: Any, loads: list[int]) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    homes = small(11)
    memories = [room(of) for of in homes]
    sent = [ring.send(of, stream, memory) for of, memory in zip(homes, memories)]
    ring.flush()
    assert all(arrived(*each) for each in zip(sent, homes, memories))
    assert sorted(loads) == [3, 4, 4]


def test_small_homes_that_wait_share_a_buffer_and_find_room_one_by_one(ring: Any, loads: list[int]) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    homes = small(4)
    sent = []
    for number, of in enumerate(homes):
        assert ring.has_room(of, stream) is (number > 0)
        sent.append(ring.send(of, stream))
    assert not ring.has_room(homes[0], stream)
    number = ring.opened
    ring.flush()
    assert not ring.has_room(homes[0], stream)
    for one in sent:
        filled(one, 1)
    assert loads == [4] and ring.opened == number
    assert ring._pool.state == (len(ring._buffers) - 1, ring.ahead - 1)
    sent[2].refuse()
    for one, of in list(zip(sent, homes))[::-1]:
        memory = room(of)
        assert one.give(memory, []) is not (one is sent[2])
        assert one is sent[2] or arrived(one, of, memory)
    assert ring._pool.state == (len(ring._buffers), ring.ahead)


def test_what_has_memory_does_not_wait_with_what_has_none(ring: Any, loads: list[int]) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    first, second, large = *small(2), home(3)
    waiting, memory = ring.send(first, stream), room(second)
    now = ring.send(second, stream, memory)
    later = ring.send(large, stream)
    ring.flush()
    assert arrived(now, second, memory)
    assert sorted(loads)[:2] == [1, 1]
    for one in (waiting, later):
        one.refuse()
        assert one.done.result(timeout=20) is None


def test_one_home_that_fails_takes_no_other_with_it_unless_it_shares_the_call(ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    homes = small(3)
    real = Home.gather

    def gather(self: Home, target: torch.Tensor, start: int) -> None:
        if self is homes[1]:
            raise OSError("the disk is gone")
        real(self, target, start)

    monkeypatch.setattr(Home, "gather", gather)
    monkeypatch.setattr(sending.Piece, "is_copied", False)
    sent = [ring.send(of, stream) for of in homes]
    ring.flush()
    for one in sent[1:]:
        until(lambda one=one: not one.wanted)  # type: ignore[misc]
    memories = [room(of) for of in homes]
    for one, memory in zip(sent, memories):
        one.give(memory, [])
    assert arrived(sent[0], homes[0], memories[0])
    for one in sent[1:]:
        with pytest.raises(OSError, match="the disk is gone"):
            one.done.result(timeout=20)
    assert ring._pool.state == (len(ring._buffers), ring.ahead)


def test_what_has_arrived_holds_no_device_memory(ring: Any) -> None:
    of, seen = home(3), list[Any]()
    memory = room(of)
    one = ring.send(of, backend.Streams(torch.device("npu:0")).new(), memory)
    one.done.add_done_callback(lambda _: seen.append(one.memory))
    ring.flush()
    until(lambda: bool(seen))
    assert seen == [None] and arrived(one, of, memory)


def test_buffers_go_without_the_garbage_collector(npu: torch.device) -> None:
    before = sim.counters()["pinned_bytes"]
    of, streams = home(3), backend.Streams(npu)
    gc.disable()
    try:
        with sim.xpu_shim():
            made = staging.Ring(4 * CHUNK, streams, threads=2)
            memory = room(of)
            assert arrived(send(made, of, streams.new(), memory), of, memory)
            waiting = send(made, of, streams.new())
            waiting.refuse()
            assert waiting.done.result(timeout=20) is None
            assert sim.counters()["pinned_bytes"] > before
            made.close()
        del made, waiting
        assert sim.counters()["pinned_bytes"] == before
    finally:
        gc.enable()
