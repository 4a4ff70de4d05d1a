"""The one module that names accelerators: streams, events and pinned host memory of a device."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

#: Host memory, as an array of bytes.
Block = numpy.ndarray[Any, Any]

#: `cudaHostRegisterPortable`: the memory counts as pinned for every device, not only for the current one.
_PORTABLE = 1


class PinError(RuntimeError):
    """Host memory could not be pinned. The message says how many bytes and why."""


class Registrar(Protocol):
    """Pins host memory that already exists, exactly as many bytes as it has. Addresses and sizes are in bytes."""

    def register(self, address: int, nbytes: int) -> None:
        """Pins the range or raises PinError."""

    def unregister(self, address: int) -> None:
        """Gives the range back; never raises."""


class CudaRegistrar:
    """`cudaHostRegister`; on ROCm the same names reach HIP."""

    def register(self, address: int, nbytes: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
        if error:
            # The runtime remembers the error and would blame the next kernel for it; the first launch takes it away.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise PinError(f"cudaHostRegister of {nbytes} bytes failed with error {error}")

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


#: Registration by device type. A type that is not listed is pinned through torch's own allocator.
REGISTRARS: dict[str, Registrar] = {"cuda": CudaRegistrar()}

#: Bytes of host memory that are pinned by slabs and staging buffers at this moment.
_pinned: dict[int, int] = {}


def pinned_bytes() -> int:
    """Bytes of host memory that this plugin holds pinned now."""
    return sum(_pinned.copy().values())


def is_pinned_here(tensor: Tensor) -> bool:
    """True if the tensor lies in memory that this plugin pinned."""
    if tensor.device.type != "cpu":
        return False
    where = tensor.data_ptr()
    # A copy in one step: a block may be collected, and its entry taken out, while this iterates.
    return any(start <= where < start + nbytes for start, nbytes in _pinned.copy().items())


def _leave_empty(_: Block) -> None:
    """Fills a block with nothing."""


def pinned_memory(nbytes: int, device: torch.device, fill: Callable[[Block], None] = _leave_empty) -> Block:
    """A pinned block of exactly `nbytes` bytes for copies to `device`, given back when its last view is let go.

    Args:
        fill: puts the contents into the block.

    Raises:
        PinError: the memory cannot be pinned, with the reason.
    """
    registrar = REGISTRARS.get(device.type)
    try:
        if registrar is None:
            return _allocated(nbytes, device, fill)
        return _registered(nbytes, registrar, fill)
    except PinError:
        raise
    except (RuntimeError, OSError, MemoryError, ValueError) as error:
        raise PinError(f"pinning {nbytes} bytes for {device} failed: {error}") from error


def _registered(nbytes: int, registrar: Registrar, fill: Callable[[Block], None]) -> Block:
    # torch's pinned allocator rounds each block up to a power of two; a mapping of our own costs what it holds,
    # and its pages go back to the system as soon as it is closed.
    block = _mapping(nbytes)
    address = block.ctypes.data
    # Before the pages are pinned: the threads that copy touch them first, all at once. The driver would do it in one thread:
    # measured on 3 GB, 2.4 s against 1.1 s.
    fill(block)
    registrar.register(address, block.nbytes)
    _count(block, address, block.nbytes)
    # Not at exit: by then the driver is gone, and the process gives the pages back anyway.
    weakref.finalize(block, registrar.unregister, address).atexit = False
    return block


def ordinary_memory(nbytes: int, fill: Callable[[Block], None]) -> Block:
    """A block of exactly `nbytes` bytes of unpinned memory; `fill` as for pinned memory."""
    block = _mapping(nbytes)
    fill(block)
    return block


#: Bytes that were let go of since free memory was last handed back.
_let_go = 0
#: Bytes after which it is: looking through the heap takes milliseconds.
_TRIM = 128 * 2**20


def let_go(nbytes: int) -> None:
    """Hands free memory back to the system now and then, told how many bytes of tensors have just been freed.

    glibc takes tensors of up to 32 MiB from its heap once some have been freed, and keeps what is freed in the middle of it: without
    this, enabling would hold a model twice.
    """
    global _let_go
    _let_go += nbytes
    if _let_go >= _TRIM:
        _let_go = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        if trim is not None:
            trim(0)


def _mapping(nbytes: int) -> Block:
    memory = mmap.mmap(-1, max(nbytes, 1))
    # Huge pages make the first touch and the registration of a slab about an order of magnitude cheaper.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return numpy.frombuffer(memory, dtype=numpy.uint8)


def _allocated(nbytes: int, device: torch.device, fill: Callable[[Block], None]) -> Block:
    tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if nbytes and not tensor.is_pinned():
        raise PinError(f"{nbytes} bytes for {device}: this torch build has no pinned memory for it")
    block: Block = tensor.numpy()
    fill(block)
    _count(block, block.ctypes.data, nbytes)
    return block


def _count(block: Block, address: int, nbytes: int) -> None:
    _pinned[address] = nbytes
    weakref.finalize(block, _pinned.pop, address, None).atexit = False


def as_tensor(block: Block, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """A 1-d tensor over bytes of a block, with a storage of its own that keeps the block alive.

    A view of one big storage would make a saver write the whole block for every tensor.
    """
    if not nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(block[offset : offset + nbytes].data, dtype=dtype)


def resolve(device: torch.device | str) -> torch.device:
    """The device with its index, so that a later change of the current device does not move anything."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        current = getattr(module(device), "current_device", None)
        return torch.device(device.type, current() if current is not None else 0)
    return device


def module(device: torch.device) -> Any:
    """The torch module of a device type (`torch.cuda`, `torch.xpu`, …)."""
    return getattr(torch, device.type)


class Streams:
    """Streams and events of one device, by explicit device everywhere: the current device plays no part."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = module(device)
        # Asking CUDA for the current stream object costs 8 us, for its handle 0.2: the objects are kept by handle.
        self._handle = getattr(torch._C, "_cuda_getCurrentRawStream", None) if device.type == "cuda" else None
        self._known: dict[int, Any] = {}

    def new(self) -> Any:
        """A new stream on the device."""
        return self._module.Stream(device=self.device)

    def current(self) -> Any:
        """The stream that the calling thread computes on."""
        if self._handle is None:
            return self._module.current_stream(self.device)
        handle = self._handle(self.device.index)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = self._module.current_stream(self.device)
        return stream

    def on(self, stream: Any) -> Any:
        """A context that runs its body on `stream`."""
        if self._handle is not None and self._module.current_device() == self.device.index:
            return _On(self._module.set_stream, stream, self.current())
        return self._module.stream(stream)

    def mark(self, stream: Any, timed: bool = False) -> Any:
        """An event recorded on `stream` now; only a timed one can be measured from."""
        event = self._module.Event(enable_timing=True) if timed else self._module.Event()
        event.record(stream)
        return event


class _On:
    """Another current stream for a while, on the current device: a sixth of what `torch.cuda.stream` costs."""

    __slots__ = ("_before", "_set", "_stream")

    def __init__(self, setter: Callable[[Any], None], stream: Any, before: Any) -> None:
        self._set, self._stream, self._before = setter, stream, before

    def __enter__(self) -> None:
        self._set(self._stream)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)


def stream_device(stream: Any, fallback: torch.device) -> torch.device:
    """The device that a stream belongs to."""
    device = getattr(stream, "device", None)
    return device if isinstance(device, torch.device) else fallback


def has_streams(device: torch.device) -> bool:
    """True if copies to the device can overlap with compute."""
    return device.type not in ("cpu", "meta") and hasattr(getattr(torch, device.type, None), "Stream")
