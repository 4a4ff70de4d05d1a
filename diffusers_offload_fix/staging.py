"""The staging ring: a few pinned buffers through which unpinned weights reach the device at the speed of the bus.

A copy from unpinned memory runs at a fraction of the bus, and blocks. Copying into pinned memory first is several times faster, and
lets the device's copies overlap with the next buffer's filling, at the price of a few buffers instead of a pinned copy of the weights.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import backend
from .homes import Home
from .layout import align

#: Bytes of one buffer: large enough that the fixed cost of a piece vanishes beside it.
CHUNK = 32 * 2**20
#: A piece is filled and sent in so many parts, so that the one overlaps with the other.
PARTS = 4
#: Threads, each with a buffer of its own. A single one is held up whenever the thread that runs the model wants one of its cores:
#: measured on 16 cores beside a busy thread, one thread of 16 OpenMP threads copies at 2 to 19 GB/s, three of 4 at 54 to 66.
WORKERS = 3


class Ring:
    """`WORKERS` threads with a pinned buffer each, for copies to one device.

    Args:
        largest: bytes of the largest unit that will pass through; the buffers take at most three times as many.

    Raises:
        backend.PinError: the buffers cannot be pinned.
    """

    def __init__(self, largest: int, streams: backend.Streams) -> None:
        self.largest = largest
        self.chunk = min(CHUNK, align(-(-3 * largest // WORKERS)))
        self._streams = streams
        blocks = [backend.pinned_memory(self.chunk, streams.device) for _ in range(WORKERS)]
        self._buffers = [backend.as_tensor(block, 0, self.chunk, torch.uint8) for block in blocks]
        self._sent: dict[int, Any] = {}
        self._own = threading.local()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    def send(self, home: Home, memory: Tensor, stream: Any, waits: list[Any]) -> list[Future[Any]]:
        """Starts copying a home to `memory` (a 1-d uint8 tensor on the device) on `stream`, after the events `waits`.

        The result of each future is an event after which a part of the bytes is there.
        """
        workers = self._workers()
        total = home.layout.nbytes
        if home.layout.device_nbytes != total:
            return [workers.submit(self._whole, home, memory, stream, waits)]
        starts = range(0, total, self.chunk)
        return [workers.submit(self._piece, home, memory, start, stream, waits) for start in starts]

    @property
    def running(self) -> bool:
        """True while there are threads."""
        return self._executor is not None

    def close(self) -> None:
        """Ends the threads, when all that they sent has arrived; the buffers stay."""
        if self._executor is not None and self._pid == os.getpid():
            self._executor.shutdown()
            for sent in self._sent.values():
                sent.synchronize()
        self._executor = None

    def _workers(self) -> ThreadPoolExecutor:
        # A thread does not survive a fork.
        if self._executor is None or self._pid != os.getpid():
            spare = deque(range(WORKERS))
            self._executor = ThreadPoolExecutor(WORKERS, "offload-staging", initializer=self._begin, initargs=(spare,))
            self._pid = os.getpid()
        return self._executor

    def _begin(self, spare: deque[int]) -> None:
        self._own.index = spare.popleft()
        share_cores()

    def _whole(self, home: Home, memory: Tensor, stream: Any, waits: list[Any]) -> Any:
        # What is laid out anew on arrival has to be there as a whole.
        for start in range(0, home.layout.nbytes, self.chunk):
            self._piece(home, memory, start, stream, waits)
        with torch.no_grad(), self._streams.on(stream):
            home.layout.unpack(memory)
        return self._streams.mark(stream)

    def _piece(self, home: Home, memory: Tensor, start: int, stream: Any, waits: list[Any]) -> Any:
        index = self._own.index
        buffer = self._buffers[index]
        end = min(start + self.chunk, home.layout.nbytes)
        if index in self._sent:
            self._sent[index].synchronize()
        # Each return to Python may have to wait for the thread that runs the model: few calls, each for many bytes.
        free = all(event.query() for event in waits)
        staged = [*_parts(buffer, 0, end - start)]
        filled = [staged, [*_parts(home.slab, start, end)]] if home.slab is not None else None
        sent = [[*_parts(memory, start, end)], staged]
        with self._streams.on(stream):
            if filled is not None and free:
                # In turns: while one part is sent the next is filled.
                copy_all(*([part for pair in zip(one, other) for part in pair] for one, other in zip(filled, sent)))
            else:
                _fill(home, buffer[: end - start], start, filled)
                for event in waits:
                    stream.wait_event(event)
                copy_all(*sent)
            event = self._sent[index] = self._streams.mark(stream)
        return event


def _fill(home: Home, part: Tensor, start: int, filled: Any) -> None:
    if filled is None:
        home.gather(part, start)
    else:
        copy_all(*filled)


def _parts(tensor: Tensor, start: int, end: int) -> list[Tensor]:
    step = align(-(-(end - start) // PARTS))
    return [tensor[first : min(first + step, end)] for first in range(start, end, step)]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source to its target, one after another, in one call that leaves the interpreter to other threads."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def share_cores() -> None:
    """Gives the calling thread an OpenMP team of its own that leaves cores to the thread that runs the model."""
    threads = max(1, 3 * torch.get_num_threads() // (4 * WORKERS))
    # `torch.set_num_threads` would change MKL's number for the whole process; OpenMP's own belongs to the thread.
    setter = getattr(ctypes.CDLL(None), "omp_set_num_threads", None) if os.name == "posix" else None
    if setter is not None:
        setter(threads)
