"""The staging ring: a few pinned buffers through which unpinned weights reach the device at the speed of the bus.

A copy from unpinned memory runs at a fraction of the bus, and blocks. Copying into pinned memory first is several times faster, and
lets the device's copies overlap with the next buffer's filling, at the price of a few buffers instead of a pinned copy of the weights.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import backend
from .homes import Home
from .layout import align
from .sending import Buffer, Load, Piece, Pool, Sending

#: Bytes of one buffer. Every load takes the interpreter from the thread that runs the model for some 0.2 ms in all, so they are large.
CHUNK = 32 * 2**20
#: Threads. A single one is held up whenever the thread that runs the model wants one of its cores: measured on 16 cores beside a busy
#: thread, one thread of 16 OpenMP threads copies at 2 to 19 GB/s, three of 4 at 54 to 66.
WORKERS = 3
#: Threads for files. While one reads a whole load in one call, the other passes on what it has read and asks for the next: a drive that
#: always has something asked of it is fastest. Measured with an empty page cache on a virtual drive: two threads that take turns in
#: parts of 4 MiB read at 1.24 to 1.27 GB/s, two at a time in whole loads at 1.58 to 1.94, three at 1.52 to 1.67.
READERS = 2
#: Buffers for each thread. With one, a thread waits for its own copy before it fills again: measured with pieces of 16 MiB on an H200,
#: one passes 32 GB/s, two 50. Half of them may be filled with what comes next while the device has no room for it.
BUFFERS = 2


class Ring:
    """Threads with pinned buffers, for copies to one device.

    Args:
        largest: bytes of the largest unit that will pass through; the buffers take at most three times as many.
        threads: how many threads.

    Attributes:
        chunk: bytes of one buffer.
        ahead: how many buffers may hold what the device has no room for yet; the others are for what is on its way.
        opened: the number of the load that was begun last: homes of one load share a buffer.

    Raises:
        backend.PinError: the buffers cannot be pinned.
    """

    def __init__(self, largest: int, streams: backend.Streams, threads: int = WORKERS) -> None:
        self.largest = largest
        self.threads = threads
        self.chunk = min(CHUNK, align(-(-largest // BUFFERS)))
        self.ahead = (BUFFERS - 1) * threads
        self._streams = streams
        blocks = [backend.pinned_memory(self.chunk, streams.device) for _ in range(BUFFERS * threads)]
        self._buffers = [Buffer(backend.as_tensor(block, 0, self.chunk, torch.uint8)) for block in blocks]
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0
        # What has not been handed to a thread yet: pieces of homes that all have memory, or all have none.
        self._waiting: list[Piece] = []
        self._sort: tuple[Any, bool] | None = None
        self.opened = 0

    def send(self, home: Home, stream: Any, memory: Tensor | None = None, waits: list[Any] | None = None) -> Sending:
        """Starts copying a home on `stream`, at the latest with the next `flush`.

        Args:
            memory: device memory for it, if there is some already (a 1-d uint8 tensor). Otherwise buffers are filled until `give`.
            waits: events that a copy into `memory` has to wait for.
        """
        starts = range(0, home.layout.nbytes, self.chunk)
        sending = Sending(self._streams, home, stream, len(starts))
        if memory is not None:
            sending.give(memory, waits or [])
        for start in starts:
            self._add(Piece(sending, start, min(start + self.chunk, home.layout.nbytes)), (stream, memory is not None))
        return sending

    def has_room(self, home: Home, stream: Any) -> bool:
        """True if a home without device memory would go with others that are waiting."""
        return bool(self._waiting) and self._sort == (stream, False) and self._fits(align(home.layout.nbytes))

    def flush(self) -> None:
        """Hands to a thread what is waiting for more to go with it."""
        if self._waiting:
            workers = self._workers()
            workers.submit(Load(self._pool, self._waiting).run)
            self._waiting = []

    @property
    def running(self) -> bool:
        """True while there are threads."""
        return self._executor is not None

    def close(self) -> None:
        """Ends the threads, when all that they sent has arrived; the buffers stay."""
        self.flush()
        if self._executor is not None and self._pid == os.getpid():
            self._executor.shutdown()
            for buffer in self._buffers:
                buffer.wait()
        self._executor = None

    def _add(self, piece: Piece, sort: tuple[Any, bool]) -> None:
        # What is wanted now must not wait for a buffer that is to be filled ahead, nor one piece of a large home for another home.
        alone = piece.sending.pieces > 1
        if alone or sort != self._sort or not self._fits(piece.nbytes):
            self.flush()
        self.opened += not self._waiting
        self._waiting.append(piece)
        self._sort = sort
        if alone:
            self.flush()

    def _fits(self, nbytes: int) -> bool:
        return sum(piece.nbytes for piece in self._waiting) + nbytes <= self.chunk

    def _workers(self) -> ThreadPoolExecutor:
        # A thread does not survive a fork, nor does anybody give back what it held.
        if self._executor is None or self._pid != os.getpid():
            self._pool = Pool(self._buffers, self.ahead)
            # No method of the ring: a thread that holds its ring would keep itself, and the buffers, alive.
            self._executor = ThreadPoolExecutor(self.threads, "offload-staging", initializer=share_cores)
            self._pid = os.getpid()
        return self._executor


def refuse_all(sendings: set[Sending]) -> None:
    """Lets go of every thread that waits for room."""
    while sendings:
        sendings.pop().refuse()


def share_cores() -> None:
    """Gives the calling thread an OpenMP team of its own that leaves cores to the thread that runs the model."""
    threads = max(1, 3 * torch.get_num_threads() // (4 * WORKERS))
    # `torch.set_num_threads` would change MKL's number for the whole process; OpenMP's own belongs to the thread.
    setter = getattr(ctypes.CDLL(None), "omp_set_num_threads", None) if os.name == "posix" else None
    if setter is not None:
        setter(threads)
