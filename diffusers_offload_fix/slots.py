"""Slots: device memory that receives slabs.

An arena is one device buffer that is cut into slots and reused, so that streaming allocates nothing while it runs. A slot that is
given back carries the events after which its bytes may be overwritten.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .layout import align


@functools.cache
def storages_resize(device_type: str) -> bool:
    """True if a device's storage can be emptied and filled again under the tensors that view it."""
    storage = torch.empty(16, dtype=torch.uint8, device=device_type).untyped_storage()
    try:
        storage.resize_(0)
        storage.resize_(16)
    except RuntimeError:
        return False
    return storage.nbytes() == 16


class Buffer:
    """A device buffer whose memory comes and goes while views of it stay.

    `memory` is a 1-d uint8 tensor of `nbytes` bytes. Its storage is empty until `resume` and again after `release`; a view that was
    made once is valid in every period between them, so nothing has to be built again for each forward. Where the device cannot do
    that (`lasting` is False), each period has memory of its own, and no view may be kept.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.lasting = storages_resize(device.type)
        self._streams: dict[Any, None] = {}

    def resume(self, stream: Any, copier: Any = None) -> bool:
        """Makes sure that there is memory; True if it was allocated by this call, for use on `stream` first.

        The allocator is told of `copier`, the stream that fills the memory: a model may be let go of while a copy is on its way.
        """
        if self._streams:
            return False
        if self.memory.untyped_storage().nbytes() != self.nbytes:
            self._fill()
        self._streams = {stream: None}
        if copier is not None and self.nbytes:
            self.memory.record_stream(copier)
        return True

    def used_on(self, stream: Any) -> None:
        """Notes a stream that reads the memory, so that the allocator waits for it too."""
        self._streams.setdefault(stream)

    def release(self) -> None:
        """Gives the memory back to the allocator."""
        for stream in list(self._streams)[1:]:
            self.memory.record_stream(stream)
        self._streams = {}
        if self.lasting:
            self.memory.untyped_storage().resize_(0)
        else:
            self.memory = self.memory.new_empty(0)

    def _fill(self) -> None:
        if self.lasting:
            self.memory.untyped_storage().resize_(self.nbytes)
        else:
            self.memory = self.memory.new_empty(self.nbytes)


class Slot:
    """Device bytes for one unit.

    Attributes:
        memory: the bytes, a 1-d uint8 tensor.
        waits: events that a copy into the slot has to wait for.
        sending: what tells the event in `ready`, while threads still copy; else None.
        ready: the events after which the slot holds its unit; none where the copy ran on the computing stream itself.
        lasting: True if a loop may keep the slot from one forward to the next.
        stamp: the tensors' change counters when the copy was issued.
        key: equal for slots at the same place of the same buffer; None if views of the slot must not be kept.
    """

    __slots__ = ("buffer", "end", "key", "lasting", "memory", "ready", "sending", "stamp", "start", "waits")

    def __init__(self, buffer: Buffer, memory: Tensor, start: int, end: int, waits: list[Any]) -> None:
        self.buffer = buffer
        self.memory = memory
        self.start = start
        self.end = end
        self.waits = waits
        self.lasting = False
        self.sending: Any = None
        self.ready: list[Any] = []
        self.stamp: list[int] = []
        self.key: Any = (buffer, start) if buffer.lasting else None


def whole(buffer: Buffer) -> Slot:
    """A slot that is a buffer of its own."""
    return Slot(buffer, buffer.memory, 0, buffer.nbytes, [])


class _Half:
    """One half of an arena: units lie in it one after another, and it starts anew once all of them are gone.

    `waits` are events of units that lay here, after which the bytes may be overwritten.
    """

    __slots__ = ("end", "held", "start", "used", "waits")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.used, self.held = start, 0
        self.waits: list[Any] = []

    def fits(self, need: int) -> bool:
        if not self.held:
            self.used = self.start
        return self.used + need <= self.end


class Arena(Buffer):
    """One device buffer that is cut into slots.

    It has two halves of the largest unit's size. One is filled with the units that come next, one after another, while those in
    the other are computed with. A largest unit therefore always finds its room once the half before last is through: with slots
    taken wherever there is room, a few small units in the middle of the buffer keep it waiting for the last of them.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes, device)
        self.taken = 0
        self._halves = (_Half(0, nbytes // 2), _Half(nbytes // 2, nbytes))
        self._turn = 0

    def take(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes` bytes, or None while there is no room."""
        need = align(nbytes)
        half = self._halves[self._turn]
        # A half that is empty gives the other a turn: what lay there last may still be computed with.
        if not half.held or not half.fits(need):
            other = self._halves[1 - self._turn]
            if not other.held and other.fits(need):
                half, self._turn = other, 1 - self._turn
            elif not half.fits(need):
                return None
        start = half.used
        half.used += need
        half.held += 1
        self.taken += 1
        half.waits = pending(half.waits)
        return Slot(self, self.memory[start : start + nbytes], start, start + need, list(half.waits))

    def give(self, slot: Slot, waits: list[Any]) -> None:
        """Takes a slot back; its bytes may be overwritten after `waits`."""
        self.taken -= 1
        half = self._halves[slot.start >= self._halves[1].start]
        half.held -= 1
        half.waits += waits

    def release(self) -> None:
        """Gives the memory back to the allocator; every slot has been given back."""
        super().release()
        for half in self._halves:
            half.waits = []
        self._turn = 0


class Allowance:
    """Device memory that small units of one lane may have for themselves, in the order in which they ask."""

    #: Bytes, in all.
    TOTAL = 8 * 2**20

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    def covers(self, unit: object, nbytes: int) -> bool:
        """True if the unit has, or from now on has, `nbytes` bytes of it."""
        if id(unit) not in self._taken and sum(self._taken.values()) + nbytes <= self.TOTAL:
            self._taken[id(unit)] = nbytes
        return id(unit) in self._taken


def pending(events: list[Any]) -> list[Any]:
    """The events that have not happened yet, each once."""
    return list({id(event): event for event in events if not event.query()}.values())
