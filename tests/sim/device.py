"""The device module `torch.npu` of the simulated accelerator, shaped like `torch.cuda`."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

DeviceLike = torch.device | str | int | None


def _index(which: DeviceLike) -> int:
    if isinstance(which, int):
        return which
    found = None if which is None else torch.device(which).index
    return current_device() if found is None else found


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    return None


def device_count() -> int:
    return 2


def current_device() -> int:
    return int(torch.ops.sim_npu.get_device())


def set_device(which: DeviceLike) -> None:
    torch.ops.sim_npu.set_device(_index(which))


class device(contextlib.ContextDecorator):
    """Makes a device the current one of this thread."""

    def __init__(self, which: DeviceLike) -> None:
        self.idx = _index(which)
        self.prev_idx = -1

    def __enter__(self) -> device:
        self.prev_idx = int(torch.ops.sim_npu.set_device(self.idx))
        return self

    def __exit__(self, *_: object) -> None:
        torch.ops.sim_npu.set_device(self.prev_idx)


def get_device_name(which: DeviceLike = None) -> str:
    return f"Simulated NPU {_index(which)}"


def get_device_capability(which: DeviceLike = None) -> tuple[int, int]:
    return (9, 0)


def get_device_properties(which: DeviceLike = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=get_device_name(which), total_memory=mem_get_info(which)[1])


# Streams -------------------------------------------------------------------------------------------------------------

Stream = torch.Stream
Event = torch.Event


def current_stream(which: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(which))


def default_stream(which: DeviceLike = None) -> torch.Stream:
    at = torch.device("npu", _index(which))
    return torch.Stream(stream_id=0, device_index=at.index, device_type=current_stream(at).device_type)


def set_stream(to: torch.Stream | None) -> None:
    if to is not None:
        torch.accelerator.set_stream(to)


class stream:
    """Runs its body on a stream, of whatever device; None changes nothing."""

    def __init__(self, to: torch.Stream | None) -> None:
        self.stream = to
        self._saved: list[torch.Stream] = []

    def __enter__(self) -> None:
        if self.stream is None:
            return
        # The stream's own device has a current stream too, which must come back as well.
        self._saved = [current_stream(self.stream.device), current_stream()]
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        for saved in self._saved:
            set_stream(saved)
        self._saved = []


def synchronize(which: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_index(which))


# Memory --------------------------------------------------------------------------------------------------------------

_DEFAULT_CAPACITY = 80 << 30


def memory_allocated(which: DeviceLike = None) -> int:
    return int(torch.ops.sim_npu.memory_allocated(_index(which)))


def max_memory_allocated(which: DeviceLike = None) -> int:
    return int(torch.ops.sim_npu.max_memory_allocated(_index(which)))


def reset_peak_memory_stats(which: DeviceLike = None) -> None:
    torch.ops.sim_npu.reset_peak(_index(which))


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def memory_stats(which: DeviceLike = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": memory_allocated(which),
        "allocated_bytes.all.peak": max_memory_allocated(which),
        "num_device_alloc": int(torch.ops.sim_npu.counters()[f"allocations.{_index(which)}"]),
    }


def mem_get_info(which: DeviceLike = None) -> tuple[int, int]:
    limit = int(torch.ops.sim_npu.memory_limit(_index(which)))
    total = _DEFAULT_CAPACITY if limit < 0 else limit
    return total - memory_allocated(which), total


def empty_cache() -> None:
    return None


def host_register(ptr: int, nbytes: int) -> None:
    """Pins existing host memory, as cudaHostRegister does."""
    torch.ops.sim_npu.host_register(ptr, nbytes)


def host_unregister(ptr: int) -> None:
    """Undoes `host_register`; the pointer must be the one that was registered."""
    torch.ops.sim_npu.host_unregister(ptr)


# Random numbers are the CPU's ----------------------------------------------------------------------------------------


def _is_in_bad_fork() -> bool:
    return False


def manual_seed(seed: int) -> None:
    return None  # torch.manual_seed has seeded the generator that the device shares with the CPU


manual_seed_all = manual_seed


def get_rng_state(which: DeviceLike = None) -> torch.Tensor:
    return torch.random.get_rng_state()


def set_rng_state(new_state: torch.Tensor, which: DeviceLike = None) -> None:
    torch.random.set_rng_state(new_state)


# Precision -----------------------------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


_HOST_REGISTER = {"host_register": host_register, "host_unregister": host_unregister}


def _refuse(*_: Any) -> None:
    raise RuntimeError("NPU error: operation not supported")


def expose_host_register(module: types.ModuleType, how: bool | str) -> None:
    """True: present; False: absent; "fail": present, and every call raises."""
    for name, function in _HOST_REGISTER.items():
        if how is False:
            module.__dict__.pop(name, None)
        else:
            setattr(module, name, _refuse if how == "fail" else function)
