"""The simulator's memory: what is pinned, what is counted, what is refused, and how it is built."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests import sim
from tests.sim import build
from tests.sim.helpers import at_rest, on_side, pinned  # noqa: F401 -- a fixture

sim.load()
npu = torch.get_device_module("npu")


# Pinned memory -------------------------------------------------------------------------------------------------------


def test_pinned_is_known_by_address() -> None:
    block = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    inside = torch.frombuffer((ctypes.c_char * 16).from_address(block.data_ptr() + 16), dtype=torch.float32)
    assert block.is_pinned() and block[8:].is_pinned() and inside.is_pinned()
    assert not torch.ones(3).is_pinned()
    assert not torch.ones(3, device="npu").is_pinned()


def test_only_cpu_tensors_can_be_pinned() -> None:
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.npu.CharTensor' only dense CPU tensors can be pinned"):
        torch.ones(3, dtype=torch.int8, device="npu").pin_memory()


def test_pinned_bytes_rise_and_fall() -> None:
    before = sim.counters()["pinned_bytes"]
    block = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
    counters = sim.counters()
    assert counters["pinned_bytes"] - before == 1000
    assert counters["pinned_reserved_bytes"] >= before + 1024  # torch rounds a pinned block up to a power of two
    del block
    assert sim.counters()["pinned_bytes"] == before
    assert sim.counters()["pinned_peak_bytes"] == before + 1000


def test_pin_limit() -> None:
    sim.set_pin_limit(sim.counters()["pinned_bytes"] + 100)
    torch.empty(100, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(101, dtype=torch.uint8, pin_memory=True)
    plain = torch.empty(101, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="out of memory"):
        npu.host_register(plain.data_ptr(), 101)


def test_registered_memory_is_pinned_until_unregistered() -> None:
    host, before = torch.tensor([1.0, 2.0, 3.0, 4.0]), sim.counters()["pinned_bytes"]
    npu.host_register(host.data_ptr(), 16)
    assert host.is_pinned() and host[1:].is_pinned()
    assert sim.counters()["pinned_bytes"] == before + 16
    x = on_side(host, side := npu.Stream())
    assert sim.pending() == 1
    side.synchronize()
    npu.host_unregister(host.data_ptr())
    assert not host.is_pinned()
    assert x.tolist() == [1, 2, 3, 4]
    assert sim.counters()["pinned_bytes"] == before
    assert sim.hazards() == []


def test_registration_is_exact() -> None:
    host = torch.zeros(16)
    npu.host_register(host.data_ptr(), 32)
    assert not torch.frombuffer(host.numpy(), dtype=torch.float32, offset=32).is_pinned()
    for start, size in ((0, 32), (16, 4), (28, 8)):
        with pytest.raises(RuntimeError, match="already mapped"):
            npu.host_register(host.data_ptr() + start, size)
    for wrong in (host.data_ptr() + 4, host.data_ptr() + 32):
        with pytest.raises(RuntimeError, match="does not correspond to a registered"):
            npu.host_unregister(wrong)
    # A copy that leaves the registered range is a pageable copy.
    host.to("npu", non_blocking=True)
    assert sim.counters()["h2d_pageable"] == 1
    npu.host_unregister(host.data_ptr())
    with pytest.raises(RuntimeError, match="invalid argument"):
        npu.host_register(host.data_ptr(), 0)


def test_unregistering_under_a_copy_is_reported() -> None:
    host = torch.ones(4)
    npu.host_register(host.data_ptr(), 16)
    x = on_side(host, npu.Stream())
    npu.host_unregister(host.data_ptr())
    assert any(h.startswith("unregistered too early") for h in sim.hazards())
    npu.synchronize()
    assert x.tolist() == [1, 1, 1, 1]


def test_host_register_can_be_taken_away() -> None:
    sim.set_host_register(False)
    assert not hasattr(npu, "host_register") and not hasattr(npu, "host_unregister")
    sim.set_host_register("fail")
    with pytest.raises(RuntimeError, match="not supported"):
        npu.host_register(1, 1)
    sim.set_host_register(True)
    assert hasattr(npu, "host_register")


# Accounts ------------------------------------------------------------------------------------------------------------


def test_device_bytes_are_counted_per_device() -> None:
    before = [npu.memory_allocated(i) for i in (0, 1)]
    x = torch.empty(1000, dtype=torch.uint8, device="npu:1")
    assert [npu.memory_allocated(i) for i in (0, 1)] == [before[0], before[1] + 1000]
    assert sim.counters()["allocations.1"] == sim.counters()["allocations"] == 1
    del x
    assert npu.memory_allocated(1) == before[1]
    assert npu.max_memory_allocated(1) == before[1] + 1000
    npu.reset_peak_memory_stats(1)
    assert npu.max_memory_allocated("npu:1") == before[1]


def test_memory_limit() -> None:
    sim.set_memory_limit(npu.memory_allocated(0) + 100, device=0)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(101, dtype=torch.uint8, device="npu:0")
    torch.empty(101, dtype=torch.uint8, device="npu:1")


def test_copies_are_counted() -> None:
    host = pinned(1, 2)
    sim.reset_counters()
    x = host.to("npu", non_blocking=True)
    torch.ones(3).to("npu")
    host.copy_(x, non_blocking=True)
    x.clone()
    counters = sim.counters()
    assert (counters["h2d"], counters["h2d_bytes"], counters["h2d_pinned"], counters["h2d_pageable"]) == (2, 20, 1, 1)
    assert (counters["d2h"], counters["d2h_bytes"], counters["d2h_pinned"]) == (1, 8, 1)
    assert (counters["d2d"], counters["d2d_bytes"]) == (1, 8)


def test_host_waits_are_counted() -> None:
    x = pinned(1, 2).to("npu", non_blocking=True)
    sim.reset_counters()
    npu.current_stream().synchronize()
    npu.synchronize()
    npu.current_stream().record_event().synchronize()
    x.sum().item()
    x.cpu()
    counters = sim.counters()
    assert (counters["stream_syncs"], counters["device_syncs"], counters["event_syncs"]) == (1, 1, 1)
    assert counters["implicit_syncs"] == 2
    assert counters["host_syncs"] == 5


def test_event_order_costs_no_host_wait() -> None:
    side, host = npu.Stream(), pinned(1, 2)
    sim.reset_counters()
    x = on_side(host, side)
    npu.current_stream().wait_stream(side)
    x + 0
    assert sim.counters()["host_syncs"] == 0


def test_memory_information() -> None:
    sim.set_memory_limit(1 << 20, device=1)
    x = torch.empty(1 << 10, dtype=torch.uint8, device="npu:1")
    expected = ((1 << 20) - npu.memory_allocated(1), 1 << 20)
    assert npu.mem_get_info(1) == expected
    assert torch.accelerator.memory_allocated(1) == npu.memory_allocated(1) >= x.nbytes


# Build ---------------------------------------------------------------------------------------------------------------


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(sim.BuildError, match=r"needs g\+\+"):
        build.library()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(sim.BuildError, match="failed"):
        build.library()
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.tmp"))
