"""Homes on their way through the staging ring: pieces of them, loads of pieces that share a buffer, and the pool of buffers."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from . import backend
from .homes import Home
from .layout import align

#: Seconds after which a thread that waits for room gives up: nobody may be left who could give any.
PATIENCE = 5.0
#: Seconds between two looks at whether a buffer has become free meanwhile.
LOOK = 0.02


class Buffer:
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


class Pool:
    """Buffers that may be filled, in the order in which they were sent; `ahead` of them for what has no room on the device yet."""

    def __init__(self, buffers: list[Buffer], ahead: int) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._lock = threading.Lock()
        self._ahead = ahead

    @property
    def state(self) -> tuple[int, int]:
        """How many buffers are free, and how many may still be filled ahead."""
        return self._free.qsize(), self._ahead

    def reserve(self) -> bool:
        """Reserves a buffer for what has no room yet; False if there are as many as there may be."""
        with self._lock:
            if not self._ahead:
                return False
            self._ahead -= 1
            return True

    def take(self) -> Buffer:
        """The buffer that has been sent longest ago."""
        return self._free.get()

    def put(self, buffer: Buffer | None, reserved: bool) -> None:
        """Takes back a buffer, and a reservation."""
        if buffer is not None:
            self._free.put(buffer)
        if reserved:
            with self._lock:
                self._ahead += 1


class Sending:
    """One home on its way to the device, whose memory may be found only after its first bytes have been staged.

    Attributes:
        pieces: how many pieces it is sent in.
        decided: set once it is known whether there is memory.
        done: its result is an event after which the bytes are there, or None if nobody wanted them any more; or what went wrong.
            It is there only when no thread touches the memory any more.
    """

    def __init__(self, streams: backend.Streams, home: Home, stream: Any, pieces: int) -> None:
        self.home = home
        self.streams = streams
        self.stream = stream
        self.pieces = pieces
        self.memory: Tensor | None = None
        self.decided = threading.Event()
        self.done: Future[Any] = Future()
        self._waits: list[Any] = []
        self._lock = threading.Lock()
        self._filled: list[Piece] = []
        self._left = pieces
        self._error: BaseException | None = None

    @property
    def wanted(self) -> bool:
        """False if no memory will be given, or a piece has failed."""
        return self._error is None and (self.memory is not None or not self.decided.is_set())

    @property
    def is_free(self) -> bool:
        """True if there is memory that can be written at once."""
        return self.memory is not None and all(event.query() for event in self._waits)

    def give(self, memory: Tensor, waits: list[Any]) -> bool:
        """Says where the bytes go: a 1-d uint8 tensor on the device, and events that a copy into it has to wait for.

        False if they were refused: then nothing is copied.
        """
        with self._lock:
            if self.decided.is_set():
                return False
            self.memory, self._waits = memory, waits
            self.decided.set()
            filled, self._filled = self._filled, []
        for piece in filled:
            try:
                self.ship(piece)
            except BaseException as error:
                self.failed(error)
            piece.finish()
        return True

    def refuse(self) -> None:
        """Says that the bytes are not wanted any more; harmless once the memory was given."""
        with self._lock:
            self.decided.set()
            filled, self._filled = self._filled, []
        for piece in filled:
            piece.finish()

    def keep(self, piece: Piece) -> bool:
        """Keeps a filled piece until there is room; False if that is decided."""
        with self._lock:
            if not self.decided.is_set():
                self._filled.append(piece)
                return True
        return False

    def ship(self, piece: Piece) -> None:
        """Copies a filled piece to the device."""
        assert self.memory is not None
        for event in self._waits:
            if not event.query():
                self.stream.wait_event(event)
        with self.streams.on(self.stream):
            self.memory[piece.start : piece.end].copy_(piece.memory, non_blocking=True)

    def failed(self, error: BaseException) -> None:
        """Notes what went wrong with a piece."""
        self._error = self._error or error

    def ended(self) -> None:
        """Notes that a piece is through, one way or the other."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        event = None
        try:
            if self.wanted:
                event = self._arrived()
        except BaseException as error:
            self.failed(error)
        # Before anybody is told: a thread that has not gone on yet must not keep device memory.
        self.memory, self._waits = None, []
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(event)

    def _arrived(self) -> Any:
        assert self.memory is not None
        layout = self.home.layout
        if layout.device_nbytes != layout.nbytes:
            # What is laid out anew on arrival has to be there as a whole.
            with torch.no_grad(), self.streams.on(self.stream):
                layout.unpack(self.memory)
        return self.streams.mark(self.stream)


class Piece:
    """Bytes `start` to `end` of a home, and their place in the buffer of its load once that is found."""

    __slots__ = ("_over", "end", "load", "memory", "sending", "start")

    def __init__(self, sending: Sending, start: int, end: int) -> None:
        self.sending, self.start, self.end = sending, start, end
        self.load: Load
        self.memory: Tensor
        self._over = False

    @property
    def nbytes(self) -> int:
        return align(self.end - self.start)

    @property
    def source(self) -> Tensor:
        """The bytes, where they can be copied from as they are: in a slab in memory."""
        assert self.sending.home.slab is not None
        return self.sending.home.slab[self.start : self.end]

    @property
    def is_copied(self) -> bool:
        """True if the bytes only have to be copied; files are read, and a home without a slab is gathered."""
        return self.sending.home.slab is not None and not self.sending.home.is_file

    def finish(self) -> None:
        """Notes that the piece is through. Harmless the second time."""
        if self._over:
            return
        self._over = True
        try:
            self.load.ended()
        except BaseException as error:
            # Somebody waits for the sending, whatever becomes of the buffer.
            self.sending.failed(error)
        self.sending.ended()


class Load:
    """Pieces that share a buffer and a stream. Each call takes the interpreter from the model, so small ones go together."""

    def __init__(self, pool: Pool, pieces: list[Piece]) -> None:
        self._pool = pool
        self._pieces = pieces
        self._buffer: Buffer | None = None
        self._reserved = False
        self._lock = threading.Lock()
        self._left = len(pieces)
        for piece in pieces:
            piece.load = self

    def run(self) -> None:
        """Fills the buffer and copies it to the device, now or when there is room; for a thread of the ring."""
        pieces, kept = self._pieces, list[Piece]()
        try:
            self._reserved = self._may_fill()
            wanted = [piece for piece in pieces if piece.sending.wanted]
            if wanted:
                self._place(wanted)
                self._fill(wanted, kept)
        except BaseException as error:
            for piece in pieces:
                if piece not in kept:
                    piece.sending.failed(error)
        for piece in pieces:
            if piece not in kept:
                piece.finish()

    def ended(self) -> None:
        """Notes that a piece is through; after the last one the buffer is given back."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            if self._buffer is not None:
                # Now, not with each piece: of the events of several threads, the one that was noted last need not be the latest.
                sending = self._pieces[0].sending
                self._buffer.sent = sending.streams.mark(sending.stream)
        finally:
            self._pool.put(self._buffer, self._reserved)
            # Pieces and their load know each other: the buffer would stay until the garbage collector comes by.
            self._buffer, self._pieces = None, []

    def _may_fill(self) -> bool:
        """Waits until all pieces have memory, or there is a buffer for what comes before it; True for such a buffer.

        What has neither after `PATIENCE` seconds is refused.
        """
        limit = time.monotonic() + PATIENCE
        while undecided := [piece.sending for piece in self._pieces if not piece.sending.decided.is_set()]:
            if self._pool.reserve():
                return True
            if time.monotonic() > limit:
                for sending in undecided:
                    sending.refuse()
            undecided[0].decided.wait(LOOK)
        return False

    def _place(self, pieces: list[Piece]) -> None:
        self._buffer = self._pool.take()
        start = 0
        for piece in pieces:
            piece.memory = self._buffer.memory[start : start + piece.end - piece.start]
            start += piece.nbytes
        self._buffer.wait()

    def _fill(self, pieces: list[Piece], kept: list[Piece]) -> None:
        """Fills the buffer and sends what has room; adds to `kept` what is kept until it has."""
        copied = [piece for piece in pieces if piece.is_copied]
        through = [piece for piece in copied if piece.sending.is_free]
        first = [piece for piece in copied if piece not in through]
        if through:
            self._through(through)
        if first:
            torch._foreach_copy_([piece.memory for piece in first], [piece.source for piece in first])
        for piece in pieces:
            if piece in through:
                continue
            if piece not in first:
                piece.sending.home.gather(piece.memory, piece.start)
            if piece.sending.keep(piece):
                kept.append(piece)
            elif piece.sending.memory is not None:
                piece.sending.ship(piece)

    @staticmethod
    def _through(pieces: list[Piece]) -> None:
        targets, sources = [], []
        for piece in pieces:
            assert piece.sending.memory is not None
            targets += [piece.memory, piece.sending.memory[piece.start : piece.end]]
            sources += [piece.source, piece.memory]
        sending = pieces[0].sending
        with sending.streams.on(sending.stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
