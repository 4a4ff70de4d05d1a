"""The staging ring: a few pinned buffers through which unpinned weights reach the device at the speed of the bus.

A copy from unpinned memory runs at a fraction of the bus, and blocks. Copying into pinned memory first is several times faster, and
lets the device's copies overlap with the next buffer's filling, at the price of a few buffers instead of a pinned copy of the weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import backend
from .homes import Home
from .layout import align

#: Bytes of one buffer: large enough that a copy's fixed cost vanishes, small enough that filling and sending overlap.
CHUNK = 16 * 2**20
#: Threads that fill buffers. A single one is held up whenever the thread that runs the model wants one of its cores: measured on 16
#: cores beside a busy thread, one thread of 16 OpenMP threads copies at 2 to 19 GB/s, three of 4 at 54 to 66.
WORKERS = 3
#: Two buffers a thread: one is filled while the other is sent.
COUNT = 2 * WORKERS


class Ring:
    """`COUNT` pinned buffers and `WORKERS` threads for copies to one device.

    Args:
        largest: bytes of the largest unit that will pass through; the buffers take at most three times as many.

    Raises:
        backend.PinError: the buffers cannot be pinned.
    """

    def __init__(self, largest: int, streams: backend.Streams) -> None:
        self.largest = largest
        self.chunk = min(CHUNK, align(-(-3 * largest // COUNT)))
        self._streams = streams
        blocks = [backend.pinned_memory(self.chunk, streams.device) for _ in range(COUNT)]
        buffers = [backend.as_tensor(block, 0, self.chunk, torch.uint8) for block in blocks]
        self._free: deque[tuple[Tensor, Any]] = deque((buffer, None) for buffer in buffers)
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
            for _, sent in self._free:
                if sent is not None:
                    sent.synchronize()
        self._executor = None

    def _workers(self) -> ThreadPoolExecutor:
        # A thread does not survive a fork.
        if self._executor is None or self._pid != os.getpid():
            self._executor = ThreadPoolExecutor(WORKERS, "offload-staging", initializer=_share_cores)
            self._pid = os.getpid()
        return self._executor

    def _whole(self, home: Home, memory: Tensor, stream: Any, waits: list[Any]) -> Any:
        # What is laid out anew on arrival has to be there as a whole.
        with torch.no_grad():
            for start in range(0, home.layout.nbytes, self.chunk):
                self._piece(home, memory, start, stream, waits)
            with self._streams.on(stream):
                home.layout.unpack(memory)
            return self._streams.mark(stream)

    def _piece(self, home: Home, memory: Tensor, start: int, stream: Any, waits: list[Any]) -> Any:
        end = min(start + self.chunk, home.layout.nbytes)
        with self._buffer() as given:
            buffer, sent = given
            if sent is not None:
                sent.synchronize()
            part = buffer if end - start == self.chunk else buffer[: end - start]
            home.gather(part, start)
            for event in waits:
                stream.wait_event(event)
            with self._streams.on(stream):
                memory[start:end].copy_(part, non_blocking=True)
            given[1] = self._streams.mark(stream)
            return given[1]

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[list[Any]]:
        # There are more buffers than threads, so one is always free.
        given = list(self._free.popleft())
        try:
            yield given
        finally:
            self._free.append((given[0], given[1]))


def _share_cores() -> None:
    """Gives the calling thread an OpenMP team of its own that leaves cores to the thread that runs the model."""
    threads = max(1, 3 * torch.get_num_threads() // (4 * WORKERS))
    # `torch.set_num_threads` would change MKL's number for the whole process; OpenMP's own belongs to the thread.
    setter = getattr(ctypes.CDLL(None), "omp_set_num_threads", None) if os.name == "posix" else None
    if setter is not None:
        setter(threads)
