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
#: Seconds after which a thread that waits for room gives up: nobody may be left who could give any.
PATIENCE = 5.0
#: Threads, each with a buffer of its own. A single one is held up whenever the thread that runs the model wants one of its cores:
#: measured on 16 cores beside a busy thread, one thread of 16 OpenMP threads copies at 2 to 19 GB/s, three of 4 at 54 to 66.
WORKERS = 3


class Ring:
    """Threads with a pinned buffer each, for copies to one device.

    Args:
        largest: bytes of the largest unit that will pass through; the buffers take at most three times as many.
        threads: how many threads; one for files, which are read one at a time and from start to end, so that the system reads ahead.

    Raises:
        backend.PinError: the buffers cannot be pinned.
    """

    def __init__(self, largest: int, streams: backend.Streams, threads: int = WORKERS) -> None:
        self.largest = largest
        self.threads = threads
        # A multiple of two aligned halves.
        self.chunk = min(CHUNK, 2 * align(-(-largest // 2)))
        self._streams = streams
        blocks = [backend.pinned_memory(self.chunk, streams.device) for _ in range(threads)]
        self._buffers = [backend.as_tensor(block, 0, self.chunk, torch.uint8) for block in blocks]
        self._sent: dict[int, Any] = {}
        self._own = threading.local()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    def send(self, home: Home, room: Room, stream: Any) -> list[Future[Any]]:
        """Starts copying a home, on `stream`, to the device memory that `room` has or will be given.

        The result of each future is an event after which a part of the bytes is there, or None if the room was refused.
        """
        workers = self._workers()
        if home.is_file:
            return [workers.submit(self._in_order, home, room, stream)]
        if home.layout.device_nbytes != home.layout.nbytes:
            return [workers.submit(self._whole, home, room, stream)]
        return [workers.submit(self._piece, home, room, start, stream) for start in range(0, home.layout.nbytes, self.chunk)]

    def pieces(self, home: Home) -> int:
        """How many threads a home can keep busy at once."""
        alone = home.is_file or home.layout.device_nbytes != home.layout.nbytes
        return 1 if alone else -(-home.layout.nbytes // self.chunk)

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
            spare = deque(range(self.threads))
            self._executor = ThreadPoolExecutor(self.threads, "offload-staging", initializer=_begin, initargs=(self._own, spare))
            self._pid = os.getpid()
        return self._executor

    def _whole(self, home: Home, room: Room, stream: Any) -> Any:
        # What is laid out anew on arrival has to be there as a whole.
        for start in range(0, home.layout.nbytes, self.chunk):
            self._piece(home, room, start, stream)
        return self._unpacked(home, room, stream)

    def _in_order(self, home: Home, room: Room, stream: Any) -> Any:
        index, half = self._own.index, align(self.chunk // 2)
        sent: list[Any] = [self._sent.get(index)] * 2
        for turn, start in enumerate(range(0, home.layout.nbytes, half)):
            if room.refused():
                return None
            if sent[turn % 2] is not None:
                sent[turn % 2].synchronize()
            end = min(start + half, home.layout.nbytes)
            part = self._buffers[index][turn % 2 * half :][: end - start]
            home.gather(part, start)
            sent[turn % 2] = self._sent[index] = self._send_part(room, part, start, stream)
        return self._unpacked(home, room, stream)

    def _unpacked(self, home: Home, room: Room, stream: Any) -> Any:
        if room.memory is None:
            return None
        with torch.no_grad(), self._streams.on(stream):
            home.layout.unpack(room.memory)
        return self._streams.mark(stream)

    def _send_part(self, room: Room, part: Tensor, start: int, stream: Any) -> Any:
        memory = room.wait()
        if memory is not None:
            for event in room.waits if start == 0 else ():
                stream.wait_event(event)
            with self._streams.on(stream):
                memory[start : start + len(part)].copy_(part, non_blocking=True)
        return self._streams.mark(stream)

    def _piece(self, home: Home, room: Room, start: int, stream: Any) -> Any:
        if room.refused():
            return None
        index = self._own.index
        if index in self._sent:
            self._sent[index].synchronize()
        end = min(start + self.chunk, home.layout.nbytes)
        staged = _parts(self._buffers[index], 0, end - start)
        filled = (staged, _parts(home.slab, start, end)) if home.slab is not None else None
        # Each return to Python may have to wait for the thread that runs the model: few calls, each for many bytes.
        together = filled is not None and room.is_free()
        if filled is None:
            home.gather(self._buffers[index][: end - start], start)
        elif not together:
            copy_all(*filled)
        memory = room.wait()
        if memory is None:
            return None
        sent = (_parts(memory, start, end), staged)
        with self._streams.on(stream):
            if filled is not None and together:
                # In turns: while one part is sent the next is filled.
                copy_all(*([part for pair in zip(one, other) for part in pair] for one, other in zip(filled, sent)))
            else:
                for event in room.waits:
                    stream.wait_event(event)
                copy_all(*sent)
            event = self._sent[index] = self._streams.mark(stream)
        return event


def _begin(own: threading.local, spare: deque[int]) -> None:
    # No method of the ring: a thread that holds its ring would keep itself, and the buffers, alive.
    own.index = spare.popleft()
    share_cores()


class Room:
    """Device memory for one unit, which may be found only after its first bytes have been staged.

    Attributes:
        memory: a 1-d uint8 tensor on the device; None while it is not given, or for good if it was refused.
        waits: events that a copy into it has to wait for.
    """

    __slots__ = ("_decided", "memory", "waits")

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.waits: list[Any] = []
        self._decided = threading.Event()

    def give(self, memory: Tensor, waits: list[Any]) -> Room:
        """Says where the bytes go."""
        self.memory, self.waits = memory, waits
        self._decided.set()
        return self

    def refuse(self) -> None:
        """Says that the bytes are not wanted any more; harmless once the memory was given."""
        self._decided.set()

    def refused(self) -> bool:
        """True if no memory will be given."""
        return self._decided.is_set() and self.memory is None

    def is_free(self) -> bool:
        """True if there is memory that can be written at once."""
        return self._decided.is_set() and all(event.query() for event in self.waits)

    def wait(self) -> Tensor | None:
        """The memory, as soon as it is given; None if it was refused, or has not come for `PATIENCE` seconds."""
        if not self._decided.is_set() and not self._decided.wait(PATIENCE):
            self.refuse()
        return self.memory


def refuse_all(rooms: set[Room]) -> None:
    """Lets go of every thread that waits for one of the rooms."""
    while rooms:
        rooms.pop().refuse()


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
