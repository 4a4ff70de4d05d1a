"""A simulated accelerator named "npu" for tests without a GPU: two devices, real stream order, and a hazard detector.

`load()` must run before diffusers is imported, because torch remembers the accelerator it finds at the first use. After
it `torch.npu` has what `torch.cuda` has: streams, events, memory figures, and `host_register`, which pins in place.

What it is strict about:
- A non-blocking copy of pinned memory runs at the last moment that the ordering allows. Until then its target holds
  0xFF bytes (NaN, or -1 for integers), and so does fresh and freed memory.
- Every use of device memory is stamped with its stream and position. `hazards()` tells of each use that conflicts with
  another one without being ordered after it, byte by byte, and of memory that is freed to its stream while another one
  may still use it.
- Tensors of different devices do not mix, and device tensors cannot be pinned.

What it does not show: compute and copies within a device run at once, so a missing wait for *them* is a hazard but not
a NaN; a non-blocking copy of pageable memory waits like a blocking one; a strided view counts from its first byte to
its last, gaps included; all host threads count as one; pinned memory is not cached.
"""

from __future__ import annotations

import atexit
import threading
import time

import torch
from torch.utils import backend_registration

from . import build, device
from .shim import xpu_shim

__all__ = [
    "BuildError",
    "counters",
    "drain",
    "hazards",
    "load",
    "pending",
    "reset",
    "reset_counters",
    "reset_hazards",
    "set_host_register",
    "set_memory_limit",
    "set_pin_limit",
    "xpu_shim",
]

BuildError = build.BuildError
_lock = threading.Lock()
_loaded = False


def load() -> None:
    """Builds and loads the device, once."""
    global _loaded
    with _lock:
        if _loaded:
            return
        torch.ops.load_library(str(build.library()))  # type: ignore[no-untyped-call]
        backend_registration.rename_privateuse1_backend("npu")
        torch._register_device_module("npu", device)  # type: ignore[no-untyped-call]
        backend_registration.generate_methods_for_privateuse1_backend()
        # Until torch has initialised a device, it says of every address that it is not pinned.
        torch.empty(1, pin_memory=True)
        torch.ops.sim_npu.reset_counters()
        # torch's backward threads drop their last Python object just after backward() returns; an interpreter that
        # ends at that moment aborts. Letting go of the GIL once lets them finish.
        atexit.register(time.sleep, 0.02)
        _loaded = True


def counters() -> dict[str, int]:
    """Copies and bytes by direction, host synchronisations, allocations, live and peak bytes, pinned bytes."""
    return dict(torch.ops.sim_npu.counters())


def reset_counters() -> None:
    """Starts the totals again; peaks fall to what is live."""
    torch.ops.sim_npu.reset_counters()


def hazards() -> list[str]:
    """Every unordered use of memory that was seen, in words."""
    return list(torch.ops.sim_npu.hazards())


def reset_hazards() -> None:
    torch.ops.sim_npu.reset_hazards()


def pending() -> int:
    """How many copies are queued and have not run."""
    return int(torch.ops.sim_npu.pending())


def drain() -> None:
    """Lets every stream of every device finish, without counting a synchronisation."""
    torch.ops.sim_npu.drain()


def set_memory_limit(nbytes: int | None, device: int = 0) -> None:
    """Device allocations beyond this raise torch.OutOfMemoryError; None lifts it."""
    torch.ops.sim_npu.set_memory_limit(device, -1 if nbytes is None else nbytes)


def set_pin_limit(nbytes: int | None) -> None:
    """Pinning or registering beyond this raises; None lifts it."""
    torch.ops.sim_npu.set_pin_limit(-1 if nbytes is None else nbytes)


def set_host_register(how: bool | str) -> None:
    """True: torch.npu has host_register; False: it has none; "fail": every call raises."""
    device.expose_host_register(torch.get_device_module("npu"), how)


def reset() -> None:
    """A machine at rest with no limits, no hazards and fresh counters: for the start of a test."""
    drain()
    for index in range(device.device_count()):
        set_memory_limit(None, index)
    set_pin_limit(None)
    set_host_register(True)
    reset_hazards()
    reset_counters()
