"""The staging ring by itself: what is filled ahead, what is refused, what fails on the way, and that no buffer is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import diffusers_offload_fix  # noqa: F401
from diffusers_offload_fix import backend, staging
from diffusers_offload_fix.homes import Home, Keep, make_home
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


def arrived(sending: staging.Sending, of: Home, memory: torch.Tensor) -> bool:
    """Whether the bytes are there after the event, and for a leaf that is laid out anew, dense."""
    event = sending.done.result(timeout=20)
    assert event is not None
    torch.npu.current_stream("npu:0").wait_event(event)
    return torch.equal(of.layout.device_views(memory)[0].cpu(), of.leaves[0])


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def filled(sending: staging.Sending, pieces: int) -> None:
    """Waits until that many pieces are in buffers."""
    until(lambda: len(sending._filled) >= pieces)


@pytest.mark.parametrize("packs", [False, True])
def test_more_pieces_than_buffers(ring: Any, packs: bool) -> None:
    of = home(50, packs=packs)
    memory = room(of)
    assert arrived(ring.send(of, backend.Streams(torch.device("npu:0")).new(), memory), of, memory)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_what_is_staged_is_sent_when_there_is_room(ring: Any, pieces: int, packs: bool) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    of = home(pieces, packs=packs)
    sending = ring.send(of, stream)
    filled(sending, min(pieces, ring.ahead))
    before, memory = sim.counters()["h2d"], room(of)
    assert not sending.done.done() and sim.counters()["h2d"] == before
    assert sending.give(memory, [])
    assert arrived(sending, of, memory)


def test_as_much_is_filled_ahead_as_leaves_buffers_for_what_is_on_its_way(ring: Any) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    waiting = ring.send(home(50), stream)
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
        sending = ring.send(of, stream)
        if turn % 3 == 1:
            filled(sending, 1)
        if turn % 2:
            sending.refuse()
            assert sending.done.result(timeout=20) is None
        else:
            memory = room(of)
            assert sending.give(memory, []) and arrived(sending, of, memory)
    assert ring._pool._free.qsize() == len(ring._buffers) and ring._pool._ahead == ring.ahead


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
    # A slab is not gathered where it can be sent at once.
    monkeypatch.setattr(staging.Sending, "_is_free", lambda self: False)
    sending = ring.send(of, stream, memory) if when == "after" else ring.send(of, stream)
    if when == "before":
        until(lambda: CHUNK in seen)
        sending.give(memory, [])
    with pytest.raises(OSError, match="the disk is gone"):
        sending.done.result(timeout=20)
    assert ring._pool._free.qsize() == len(ring._buffers) and ring._pool._ahead == ring.ahead
    assert sending._left == 0
    monkeypatch.setattr(Home, "gather", real)
    assert arrived(ring.send(of, stream, memory), of, memory)


def test_a_thread_that_waits_for_room_gives_up(ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PATIENCE", 0.05)
    stream = backend.Streams(torch.device("npu:0")).new()
    waiting = ring.send(home(50), stream)
    assert waiting.done.result(timeout=20) is None
    assert not waiting.give(room(waiting.home), [])


def test_refused_sendings_let_go_of_their_threads(ring: Any) -> None:
    stream = backend.Streams(torch.device("npu:0")).new()
    sendings = {ring.send(home(50), stream) for _ in range(3)}
    all_of_them = list(sendings)
    staging.refuse_all(sendings)
    assert [sending.done.result(timeout=20) for sending in all_of_them] == [None] * 3 and not sendings
