"""Figures of the machine: the bus, host memory of this process, device memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffusers_offload_fix import backend

MIB = 1 << 20
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def bus(device: torch.device, mib: int) -> dict[str, float]:
    """Rates in GB/s (1e9): pinned host to device, and host memcpy into pinned memory; the best of several copies."""
    nbytes = mib * MIB
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def cross() -> None:
        target.copy_(pinned, non_blocking=True)
        synchronize(device)

    return {"pinned_gbs": nbytes / _best(cross) / 1e9, "memcpy_gbs": nbytes / _best(lambda: pinned.copy_(source)) / 1e9}


def _best(work: Callable[[], object], times: int = 5) -> float:
    work()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return max(min(found), 1e-9)


def synchronize(device: torch.device) -> None:
    backend.module(device).synchronize(device)


def release(device: torch.device) -> None:
    """Gives back what caches hold, so that one case does not show in the next."""
    gc.collect()
    synchronize(device)
    backend.module(device).empty_cache()
    for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
        empty = getattr(torch._C, name, None)
        if empty is not None:
            empty()
            return


def allocated(device: torch.device) -> int:
    return int(backend.module(device).memory_allocated(device))


def peak(device: torch.device) -> int:
    return int(backend.module(device).max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    backend.module(device).reset_peak_memory_stats(device)


def pinned_bytes(device: torch.device) -> int:
    """Host memory that is pinned now, by torch's allocator (with its rounding) and by the plugin."""
    stats: Any = getattr(backend.module(device), "host_memory_stats", dict)()
    by_torch = int(stats.get("allocated_bytes.current", 0))
    # What the plugin takes from torch's allocator is in torch's figure already, where there is one.
    by_plugin = backend.pinned_bytes() if device.type in backend.REGISTRARS or not stats else 0
    return by_torch + by_plugin


class HostMemory:
    """Host memory of this process: what it has now, and the most that it had inside the `with` block.

    Attributes:
        before: bytes at the beginning.
        peak: the most, from the kernel's own mark where it can be reset, else from samples every few milliseconds.
    """

    def __enter__(self) -> HostMemory:
        self.before = self.peak = resident_set()
        self._marked = _reset_mark()
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        if not self._marked:
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if not self._marked:
            self._sampler.join()
        self.peak = max(self.peak, resident_set(), resident_set("VmHWM") if self._marked else 0)

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, resident_set())


def resident_set(field: str = "VmRSS") -> int:
    """Bytes of host memory of this process (`VmRSS`), or the kernel's mark of the most (`VmHWM`); 0 if it does not say."""
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_mark() -> bool:
    """Makes `VmHWM` start from now; False where the system does not do that."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    now = resident_set()
    return 0 < resident_set("VmHWM") <= now + 64 * MIB
