"""The simulated accelerator: what is not ordered reads NaN or is reported, and what is ordered does not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests import sim
from tests.sim.helpers import at_rest, on_side, pinned  # noqa: F401 -- a fixture

sim.load()
npu = torch.get_device_module("npu")


# Stream order ---------------------------------------------------------------------------------------------------------


def test_a_missing_wait_reads_nan() -> None:
    side = npu.Stream()
    x = on_side(pinned(1, 2), side)
    assert sim.pending() == 1
    assert (x + 0).isnan().all()
    assert any(h.startswith("read after write") for h in sim.hazards())


def test_a_missing_wait_reads_nan_in_a_reused_slot() -> None:
    slot, side = torch.zeros(2, device="npu"), npu.Stream()
    side.wait_stream(npu.current_stream())
    with npu.stream(side):
        slot.copy_(pinned(1, 2), non_blocking=True)
    assert (slot + 0).isnan().all()


@pytest.mark.parametrize("wait", ["stream", "device", "event", "wait_event", "wait_stream", "query", "same stream"])
def test_every_kind_of_wait_makes_the_copy_visible(wait: str) -> None:
    side, current = npu.Stream(), npu.current_stream()
    x = on_side(pinned(1, 2), side)
    event = side.record_event()
    if wait == "stream":
        side.synchronize()
    elif wait == "device":
        npu.synchronize()
    elif wait == "event":
        event.synchronize()
    elif wait == "wait_event":
        current.wait_event(event)
    elif wait == "wait_stream":
        current.wait_stream(side)
    elif wait == "query":
        assert not event.query()
        assert event.query()
    else:
        with npu.stream(side):
            assert (x + 0).tolist() == [1, 2]
    assert (x + 0).tolist() == [1, 2]
    assert sim.hazards() == []


def test_an_earlier_event_does_not_cover_a_later_copy() -> None:
    side = npu.Stream()
    first = on_side(pinned(1), side)
    event = side.record_event()
    second = on_side(pinned(2), side)
    npu.current_stream().wait_event(event)
    assert (first + 0).item() == 1
    assert (second + 0).isnan().all()


def test_order_is_transitive() -> None:
    a, b = npu.Stream(), npu.Stream()
    x = on_side(pinned(1, 2), a)
    b.wait_stream(a)
    npu.current_stream().wait_stream(b)
    assert (x + 0).tolist() == [1, 2]
    assert sim.hazards() == []


def test_a_host_buffer_is_written_at_the_wait() -> None:
    x, host, side = torch.ones(2, device="npu"), torch.zeros(2, pin_memory=True), npu.Stream()
    side.wait_stream(npu.current_stream())
    with npu.stream(side):
        host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    side.synchronize()
    assert host.tolist() == [1, 1]


def test_a_staging_buffer_that_is_rewritten_too_early_sends_the_wrong_bytes() -> None:
    staging, side = pinned(1, 2), npu.Stream()
    x = on_side(staging, side)
    staging.fill_(7)
    side.synchronize()
    assert x.tolist() == [7, 7]


def test_pageable_and_blocking_copies_wait_for_themselves() -> None:
    side = npu.Stream()
    x = on_side(torch.tensor([1.0, 2.0]), side)
    with npu.stream(side):
        y = pinned(3, 4).to("npu")
    assert sim.pending() == 0
    assert (x + y).tolist() == [4, 6]
    assert sim.hazards() == []


def test_a_queued_copy_leaves_the_gaps_of_its_target_alone() -> None:
    target, side = torch.zeros(2, 3, device="npu"), npu.Stream()
    side.wait_stream(npu.current_stream())
    with npu.stream(side):
        target[:, 1].copy_(pinned(1, 2), non_blocking=True)
    assert target[:, ::2].sum().item() == 0
    side.synchronize()
    assert target.tolist() == [[0, 1, 0], [0, 2, 0]]


def test_modes_do_not_disturb_queued_copies() -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    target, side = torch.zeros(2, 2, device="npu"), npu.Stream()
    with Mode(), npu.stream(side):  # type: ignore[no-untyped-call]
        target[:, 1].copy_(pinned(1, 2), non_blocking=True)
        side.synchronize()
    assert target.tolist() == [[0, 1], [0, 2]]


def test_a_temporary_may_die_before_its_copy_has_run() -> None:
    host = torch.empty(3, pin_memory=True)
    host.copy_(torch.ones(3, device="npu") * 5, non_blocking=True)
    x = torch.ones(3).pin_memory().to("npu", non_blocking=True)
    npu.synchronize()
    assert host.tolist() == [5, 5, 5]
    assert x.tolist() == [1, 1, 1]
    assert sim.hazards() == []


def test_a_thread_has_its_own_stream_and_device() -> None:
    seen: list[object] = []

    def work() -> None:
        seen.extend([npu.current_stream(), npu.current_device()])
        npu.set_device(1)

    with npu.stream(npu.Stream()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert npu.current_stream() != npu.default_stream()
    assert seen == [npu.default_stream(), 0]
    assert npu.current_device() == 0


def test_threads_may_work_at_the_same_time() -> None:
    results: list[bool] = []

    def work(n: int) -> None:
        stream = npu.Stream()
        for _ in range(50):
            x = on_side(torch.full((64,), float(n)).pin_memory(), stream)
            npu.current_stream().wait_stream(stream)
            results.append((x * 2).sum().item() == 128 * n)
            stream.wait_stream(npu.current_stream())  # before x is freed to its stream

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 200


def test_generic_streams_and_events() -> None:
    stream = torch.Stream(device="npu:1")
    with npu.stream(stream):
        assert torch.accelerator.current_stream(1) == stream
        x = pinned(1).to("npu", non_blocking=True)
    assert x.device == torch.device("npu:1")
    assert npu.current_device() == 0
    event = torch.Event("npu:1", enable_timing=True)
    event.record(stream)
    event.wait(npu.current_stream(1))
    assert (x + 0).tolist() == [1]


# Hazards -------------------------------------------------------------------------------------------------------------


def _refill_while_computing(ordered: bool, source: slice, target: slice) -> list[str]:
    arena, side = torch.ones(8, device="npu"), npu.Stream()
    side.wait_stream(npu.current_stream())
    arena[source].sum()
    if ordered:
        side.wait_stream(npu.current_stream())
    with npu.stream(side):
        arena[target].copy_(torch.zeros(4).pin_memory(), non_blocking=True)
    npu.synchronize()
    return sim.hazards()


def test_write_after_read_needs_an_event() -> None:
    assert any(h.startswith("write after read") for h in _refill_while_computing(False, slice(0, 4), slice(0, 4)))
    sim.reset_hazards()
    assert _refill_while_computing(True, slice(0, 4), slice(0, 4)) == []


def test_hazards_are_seen_byte_by_byte() -> None:
    assert _refill_while_computing(False, slice(0, 4), slice(4, 8)) == []
    assert _refill_while_computing(False, slice(0, 5), slice(4, 8)) != []


def test_write_after_write_is_reported() -> None:
    slot, a, b = torch.empty(2, device="npu"), npu.Stream(), npu.Stream()
    for stream in (a, b):
        with npu.stream(stream):
            slot.copy_(pinned(1, 2), non_blocking=True)
    assert any(h.startswith("write after write") for h in sim.hazards())


@pytest.mark.parametrize("protection", ["none", "record_stream", "wait", "host"])
def test_memory_is_freed_to_the_stream_that_allocated_it(protection: str) -> None:
    side, current = npu.Stream(), npu.current_stream()
    x = on_side(pinned(1, 2), side)
    current.wait_stream(side)
    x.sum()
    if protection == "record_stream":
        x.record_stream(current)
    elif protection == "wait":
        side.wait_stream(current)
    elif protection == "host":
        current.synchronize()
    del x
    assert [h[:15] for h in sim.hazards()] == (["freed too early"] if protection == "none" else [])


def test_device_memory_freed_under_a_copy_is_reported_and_lost() -> None:
    side, host = npu.Stream(), torch.zeros(2, pin_memory=True)
    x = torch.ones(2, device="npu")
    side.wait_stream(npu.current_stream())
    with npu.stream(side):
        host.copy_(x, non_blocking=True)
    del x
    side.synchronize()
    assert host.isnan().all()
    assert any(h.startswith("freed too early") for h in sim.hazards())
