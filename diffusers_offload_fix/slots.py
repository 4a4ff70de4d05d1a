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
        job: the future whose result is `ready`, while a worker still copies; else None.
        ready: the event after which the slot holds its unit, or None where the copy ran on the computing stream itself.
        stamp: the tensors' change counters when the copy was issued.
        key: equal for slots at the same place of the same buffer; None if views of the slot must not be kept.
    """

    __slots__ = ("buffer", "end", "job", "key", "memory", "ready", "stamp", "start", "waits")

    def __init__(self, buffer: Buffer, memory: Tensor, start: int, end: int, waits: list[Any]) -> None:
        self.buffer = buffer
        self.memory = memory
        self.start = start
        self.end = end
        self.waits = waits
        self.job: Any = None
        self.ready: Any = None
        self.stamp: list[int] = []
        self.key: Any = (buffer, start) if buffer.lasting else None


def whole(buffer: Buffer) -> Slot:
    """A slot that is a buffer of its own."""
    return Slot(buffer, buffer.memory, 0, buffer.nbytes, [])


class _Free:
    __slots__ = ("end", "start", "waits")

    def __init__(self, start: int, end: int, waits: list[Any]) -> None:
        self.start, self.end, self.waits = start, end, waits


class Arena(Buffer):
    """One device buffer that is cut into slots.

    Slots are taken from alternating ends: the next unit then never sits in the middle of the space that the one after it needs.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes, device)
        self.taken = 0
        self._free = [_Free(0, nbytes, [])]
        self._from_left = True

    def take(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes` bytes, or None if no free run is long enough."""
        need = align(nbytes)
        fits = [run for run in self._free if run.end - run.start >= need]
        if not fits:
            return None
        run = fits[0] if self._from_left else fits[-1]
        start = run.start if self._from_left else run.end - need
        if self._from_left:
            run.start += need
        else:
            run.end = start
        self._from_left = not self._from_left
        if run.start == run.end:
            self._free.remove(run)
        self.taken += 1
        return Slot(self, self.memory[start : start + nbytes], start, start + need, list(run.waits))

    def give(self, slot: Slot, waits: list[Any]) -> None:
        """Takes a slot back; its bytes may be overwritten after `waits`."""
        self.taken -= 1
        self._free.append(_Free(slot.start, slot.end, waits))
        self._free.sort(key=lambda run: run.start)
        joined: list[_Free] = []
        for run in self._free:
            if joined and joined[-1].end == run.start:
                joined[-1].end = run.end
                joined[-1].waits = pending(joined[-1].waits + run.waits)
            else:
                joined.append(run)
        self._free = joined

    def release(self) -> None:
        """Gives the memory back to the allocator; every slot has been given back."""
        super().release()
        self._free = [_Free(0, self.nbytes, [])]
        self._from_left = True


def pending(events: list[Any]) -> list[Any]:
    """The events that have not happened yet, each once."""
    return list({id(event): event for event in events if not event.query()}.values())
