"""The staging ring: a few pinned buffers through which unpinned weights reach the device at the speed of the bus.

A copy from unpinned memory runs at a fraction of the bus, and blocks. Copying into pinned memory first is several times faster, and
lets the device's copies overlap with the next buffer's filling, at the price of a few buffers instead of a pinned copy of the weights.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import backend
from .homes import Home
from .layout import align

#: Bytes of one buffer. Every piece takes the interpreter from the thread that runs the model for some 0.2 ms in all, so they are large.
CHUNK = 32 * 2**20
#: Threads. A single one is held up whenever the thread that runs the model wants one of its cores: measured on 16 cores beside a busy
#: thread, one thread of 16 OpenMP threads copies at 2 to 19 GB/s, three of 4 at 54 to 66.
WORKERS = 3
#: Buffers for each thread. With one, a thread waits for its own copy before it fills again: measured with pieces of 16 MiB on an H200,
#: one passes 32 GB/s, two 50. Half of them may be filled with what comes next while the device has no room for it.
BUFFERS = 2
#: Seconds after which a thread that waits for room gives up: nobody may be left who could give any.
PATIENCE = 5.0


class Ring:
    """Threads with pinned buffers, for copies to one device.

    Args:
        largest: bytes of the largest unit that will pass through; the buffers take at most three times as many.
        threads: how many threads; one for files, which are read one at a time and from start to end, so that the system reads ahead.

    Attributes:
        chunk: bytes of one buffer.
        ahead: how many buffers may hold what the device has no room for yet; the others are for what is on its way.

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
        self._buffers = [_Buffer(backend.as_tensor(block, 0, self.chunk, torch.uint8)) for block in blocks]
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    def send(self, home: Home, stream: Any, memory: Tensor | None = None, waits: list[Any] | None = None) -> Sending:
        """Starts copying a home on `stream`.

        Args:
            memory: device memory for it, if there is some already (a 1-d uint8 tensor). Otherwise buffers are filled until `give`.
            waits: events that a copy into `memory` has to wait for.
        """
        workers = self._workers()
        starts = range(0, home.layout.nbytes, self.chunk)
        sending = Sending(self._pool, self._streams, home, stream, len(starts))
        if memory is not None:
            sending.give(memory, waits or [])
        for start in starts:
            workers.submit(sending.piece, start, min(start + self.chunk, home.layout.nbytes))
        return sending

    @property
    def running(self) -> bool:
        """True while there are threads."""
        return self._executor is not None

    def close(self) -> None:
        """Ends the threads, when all that they sent has arrived; the buffers stay."""
        if self._executor is not None and self._pid == os.getpid():
            self._executor.shutdown()
            for buffer in self._buffers:
                buffer.wait()
        self._executor = None

    def _workers(self) -> ThreadPoolExecutor:
        # A thread does not survive a fork, nor does anybody give back what it held.
        if self._executor is None or self._pid != os.getpid():
            self._pool = _Pool(self._buffers, self.ahead)
            self._executor = ThreadPoolExecutor(self.threads, "offload-staging", initializer=share_cores)
            self._pid = os.getpid()
        return self._executor


class _Pool:
    """Buffers that may be filled, in the order in which they were sent; some of them for what has no room on the device yet."""

    def __init__(self, buffers: list[_Buffer], ahead: int) -> None:
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._lock = threading.Lock()
        self._ahead = ahead

    def reserve(self) -> bool:
        """Reserves a buffer for a piece for which there is no room yet; False if there are as many as there may be."""
        with self._lock:
            if not self._ahead:
                return False
            self._ahead -= 1
            return True

    def take(self) -> _Buffer:
        """The buffer that has been sent longest ago."""
        return self._free.get()

    def put(self, piece: _Piece) -> None:
        """Takes back what a piece has."""
        if piece.buffer is not None:
            self._free.put(piece.buffer)
        if piece.reserved:
            with self._lock:
                self._ahead += 1


class _Buffer:
    """Pinned memory, and the event after which it may be filled again."""

    __slots__ = ("memory", "sent")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.sent: Any = None

    def wait(self) -> None:
        # Waiting lets go of the interpreter, also where there is nothing to wait for, and has to get it back from the busiest thread.
        if self.sent is not None and not self.sent.query():
            self.sent.synchronize()
        self.sent = None


class _Piece:
    """Bytes `start` to `end` of a home.

    Attributes:
        buffer: what they are staged in, or None before it was found.
        memory: as much of the buffer as the piece has.
        reserved: True if the buffer is one of those that are filled ahead.
    """

    __slots__ = ("buffer", "end", "memory", "reserved", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.buffer: _Buffer | None = None
        self.memory = torch.empty(0)
        self.reserved = False

    def take(self, buffer: _Buffer) -> None:
        """Takes a buffer as soon as it may be filled."""
        self.buffer = buffer
        self.memory = buffer.memory[: self.end - self.start]
        buffer.wait()


class Sending:
    """One home on its way to the device, whose memory may be found only after its first bytes have been staged.

    Attributes:
        done: its result is an event after which the bytes are there, or None if nobody wanted them any more; or what went wrong.
            It is there only when no thread touches the memory any more.
    """

    def __init__(self, pool: _Pool, streams: backend.Streams, home: Home, stream: Any, pieces: int) -> None:
        self.home = home
        self.pieces = pieces
        self.done: Future[Any] = Future()
        self._pool = pool
        self._streams = streams
        self._stream = stream
        self._memory: Tensor | None = None
        self._waits: list[Any] = []
        self._decided = threading.Event()
        self._lock = threading.Lock()
        self._filled: list[_Piece] = []
        self._left = pieces
        self._error: BaseException | None = None

    @property
    def wanted(self) -> bool:
        """False if no memory will be given, or a piece has failed."""
        return self._error is None and (self._memory is not None or not self._decided.is_set())

    def give(self, memory: Tensor, waits: list[Any]) -> bool:
        """Says where the bytes go: a 1-d uint8 tensor on the device, and events that a copy into it has to wait for.

        False if they were refused: then nothing is copied.
        """
        with self._lock:
            if self._decided.is_set():
                return False
            self._memory, self._waits = memory, waits
            self._decided.set()
            filled, self._filled = self._filled, []
        for piece in filled:
            try:
                self._ship(piece)
            except BaseException as error:
                self._failed(error)
            self._end(piece)
        return True

    def refuse(self) -> None:
        """Says that the bytes are not wanted any more; harmless once the memory was given."""
        with self._lock:
            self._decided.set()
            filled, self._filled = self._filled, []
        for piece in filled:
            self._end(piece)

    def piece(self, start: int, end: int) -> None:
        """Stages the bytes from `start` to `end` and copies them to the device, now or when there is room; for a thread of the ring."""
        piece, kept = _Piece(start, end), False
        try:
            piece.reserved = self._may_fill()
            if self.wanted:
                piece.take(self._pool.take())
                kept = self._fill(piece)
        except BaseException as error:
            self._failed(error)
        if not kept:
            self._end(piece)

    def _may_fill(self) -> bool:
        """Waits until there is memory, or a buffer for a piece that comes before it; True for such a buffer.

        The bytes are refused if neither has come for `PATIENCE` seconds.
        """
        if self._decided.is_set():
            return False
        if self._pool.reserve():
            return True
        if not self._decided.wait(PATIENCE):
            self.refuse()
        return False

    def _fill(self, piece: _Piece) -> bool:
        """Fills the piece's buffer and copies it to the device; True if it is kept until there is room."""
        if self.home.slab is not None and not self.home.is_file and self._is_free():
            self._through(piece)
            return False
        self.home.gather(piece.memory, piece.start)
        with self._lock:
            if not self._decided.is_set():
                self._filled.append(piece)
                return True
        if self._memory is not None:
            self._ship(piece)
        return False

    def _failed(self, error: BaseException) -> None:
        """Notes what went wrong with a piece."""
        self._error = self._error or error

    def _end(self, piece: _Piece) -> None:
        """Notes that a piece is through, one way or the other, and gives its buffer back."""
        self._pool.put(piece)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        event = None
        try:
            if self.wanted:
                event = self._arrived()
        except BaseException as error:
            self._failed(error)
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(event)

    def _is_free(self) -> bool:
        return self._memory is not None and all(event.query() for event in self._waits)

    def _through(self, piece: _Piece) -> None:
        # One call: each return to Python may have to wait for the thread that runs the model.
        assert self.home.slab is not None and self._memory is not None
        source, target = self.home.slab[piece.start : piece.end], self._memory[piece.start : piece.end]
        with self._streams.on(self._stream):
            torch._foreach_copy_([piece.memory, target], [source, piece.memory], non_blocking=True)
        self._sent(piece)

    def _ship(self, piece: _Piece) -> None:
        assert self._memory is not None
        for event in self._waits:
            if not event.query():
                self._stream.wait_event(event)
        with self._streams.on(self._stream):
            self._memory[piece.start : piece.end].copy_(piece.memory, non_blocking=True)
        self._sent(piece)

    def _sent(self, piece: _Piece) -> None:
        assert piece.buffer is not None
        piece.buffer.sent = self._streams.mark(self._stream)

    def _arrived(self) -> Any:
        assert self._memory is not None
        layout = self.home.layout
        if layout.device_nbytes != layout.nbytes:
            # What is laid out anew on arrival has to be there as a whole.
            with torch.no_grad(), self._streams.on(self._stream):
                layout.unpack(self._memory)
        return self._streams.mark(self._stream)


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
