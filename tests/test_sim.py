"""The rules of the simulated accelerator: what a correct program sees, and what an incorrect one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import sim
from tests.sim.helpers import on_side, pinned

sim.load()
npu = torch.get_device_module("npu")


@pytest.fixture(autouse=True)
def _at_rest() -> Iterator[None]:
    sim.reset()
    npu.set_device(0)
    yield
    sim.reset()


# Device --------------------------------------------------------------------------------------------------------------


def test_is_the_accelerator_of_this_process() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.is_available()
    assert npu.device_count() == torch.accelerator.device_count() == 2


def test_loads_once() -> None:
    sim.load()
    assert torch.get_device_module("npu") is npu


def test_two_devices_with_a_current_one() -> None:
    assert torch.empty(1, device="npu").device == torch.device("npu:0")
    with npu.device(1):
        assert torch.empty(1, device="npu").device == torch.device("npu:1")
        assert npu.Stream().device == torch.device("npu:1")
    assert npu.current_device() == 0
    npu.set_device("npu:1")
    assert torch.empty(1, device="npu").device == torch.device("npu:1")


def test_there_is_no_third_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="npu:2")


def test_copies_between_devices() -> None:
    a = torch.arange(4.0, device="npu:0")
    assert a.to("npu:1").tolist() == [0, 1, 2, 3]
    assert sim.counters()["d2d"] == 1
    assert sim.hazards() == []


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
@pytest.mark.parametrize("op", [torch.add, torch.mm, torch.nn.functional.linear])
def test_mixed_devices_raise(op: Callable[..., torch.Tensor], other: str) -> None:
    here, there = torch.ones(2, 2, device="npu:0"), torch.ones(2, 2, device=other)
    for pair in ((here, there), (there, here)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found"):
            op(*pair)


def test_cpu_scalars_mix() -> None:
    assert (torch.ones(2, device="npu") + torch.tensor(1.0)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="npu:0") + torch.tensor(1.0, device="npu:1")


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(5, device="npu").isnan().all()
    assert torch.empty(5, pin_memory=True).isnan().all()


def test_freed_memory_is_nan_and_its_use_is_reported() -> None:
    owner = torch.ones(4, device="npu")
    storage: Any = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), torch.device("npu:0"), 16)
    stale = torch.empty(0, device="npu").set_(storage, 0, (4,), (1,))
    assert stale.tolist() == [1, 1, 1, 1]
    del owner
    assert stale.isnan().all()
    assert any(h.startswith("use after free") for h in sim.hazards())


def test_results_equal_the_cpu() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
    x = torch.randn(3, 16)
    expected = net(x)
    expected.sum().backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net.to("npu")
    result = net(x.to("npu"))
    result.sum().backward()
    assert torch.equal(result.cpu(), expected)
    assert all(torch.equal(p.grad.cpu(), g) for p, g in zip(net.parameters(), grads, strict=True) if p.grad is not None)


def test_attention_and_convolution_equal_the_cpu() -> None:
    q = torch.randn(1, 2, 64, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    conv, image = torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        device_q = q.to("npu")
        assert torch.equal(attend(device_q, device_q, device_q).cpu(), attend(q, q, q))
        expected = conv(image)
        assert torch.equal(conv.to("npu")(image.to("npu")).cpu(), expected)


def test_int8_and_float8_products() -> None:
    a = torch.randint(-9, 9, (32, 32), dtype=torch.int8)
    assert torch.equal(torch._int_mm(a.to("npu"), a.to("npu")).cpu(), torch._int_mm(a, a))
    f = torch.randn(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())

    def product(device: str) -> torch.Tensor:
        a, b, scale = f.to(device), f.t().to(device), one.to(device)
        return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16).cpu()

    assert torch.equal(product("npu"), product("cpu"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles(backend: str) -> None:
    torch._dynamo.reset()
    net, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with torch.no_grad():
        expected = net(x)
        assert torch.equal(torch.compile(net.to("npu"), backend=backend)(x.to("npu")).cpu(), expected)


def test_data_setter_and_swap_cross_devices() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    for device in ("npu:0", "npu:1", "cpu"):
        p.data = torch.zeros(3, device=device)
        assert p.device == torch.device(device)
    q = torch.nn.Parameter(torch.ones(3, device="npu"))
    torch.utils.swap_tensors(p, q)  # type: ignore[no-untyped-call]
    assert p.device.type == "npu" and q.device.type == "cpu"


# Stream order --------------------------------------------------------------------------------------------------------


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
