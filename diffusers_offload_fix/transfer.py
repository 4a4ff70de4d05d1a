"""Transfers: the copies of one lane, from host memory into slots.

Pinned memory is copied on the lane's stream. Any other passes through the staging ring, whose threads issue the copies. Where there is
no copy stream the host waits for each copy, as it does upstream: the weights may be changed as soon as the call returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from . import backend
from .homes import Home, warn_unpinned
from .slots import Slot
from .staging import CHUNK, Ring
from .unit import Unit

#: Bytes under which a copy from unpinned memory is left to the driver.
SMALL = 64 * 2**10

#: Told of every copy and of every stay on the device, for a picture of what overlaps: `trace(what, unit, start, end)`, where `what`
#: is "copy" or "compute" and `start` and `end` are timed events.
trace: Callable[[str, str, Any, Any], None] | None = None


class Transfer:
    """Issues the copies to `device`, on `stream` or, where that is None, on the stream that computes.

    Attributes:
        streams: streams and events of the device, or None where copies cannot overlap.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.stream = stream
        self.streams = backend.Streams(device) if backend.has_streams(device) else None
        self._ring: Ring | None = None
        self._no_ring = False

    def start(self, unit: Unit, slot: Slot) -> None:
        """Starts copying the unit's home into the slot."""
        ring = self._ring_for(unit)
        if self.streams is None:
            unit.home.copy_to(slot.memory, non_blocking=False)
        elif self.stream is None:
            self._at_once(unit.home, slot, ring)
        elif ring is not None:
            began = self.timed(self.stream)
            slot.jobs = ring.send(unit.home, slot.memory, self.stream, slot.waits)
            if trace is not None:
                self._tell_jobs(unit, slot, began)
        else:
            for event in slot.waits:
                self.stream.wait_event(event)
            began = self.timed(self.stream)
            with self.streams.on(self.stream):
                unit.home.copy_to(slot.memory, non_blocking=True)
            slot.ready = [self.streams.mark(self.stream)]
            self.tell("copy", unit, began, self.stream)

    def _at_once(self, home: Home, slot: Slot, ring: Ring | None) -> None:
        assert self.streams is not None
        if ring is None:
            home.copy_to(slot.memory, non_blocking=False)
            return
        for job in ring.send(home, slot.memory, self.streams.current(), []):
            job.result().synchronize()

    def collect(self, slot: Slot) -> None:
        """Waits until the ring has issued the slot's copies; its error, if there was one, is raised here."""
        jobs, slot.jobs = slot.jobs, []
        if not jobs:
            return
        try:
            slot.ready = [job.result() for job in jobs]
        except BaseException:
            self._settle(jobs)
            raise

    @staticmethod
    def _settle(jobs: list[Any]) -> None:
        # No thread may still write into a slot that is given back.
        for job in jobs:
            with contextlib.suppress(Exception):
                job.result()

    @property
    def busy(self) -> bool:
        """True while the ring has threads."""
        return self._ring is not None and self._ring.running

    def close(self) -> None:
        """Ends the ring's threads."""
        if self._ring is not None:
            self._ring.close()

    def timed(self, stream: Any) -> Any:
        """A timed event if somebody traces."""
        return self.streams.mark(stream, timed=True) if trace is not None and self.streams is not None else None

    def tell(self, what: str, unit: Unit, began: Any, stream: Any) -> None:
        """Tells the trace of something that began at the event `began` and ends here."""
        if trace is not None and began is not None:
            trace(what, unit.name, began, self.timed(stream))

    def _tell_jobs(self, unit: Unit, slot: Slot, began: Any) -> None:
        told = trace
        jobs = list(slot.jobs)
        last = jobs[-1]

        def done(_: Any) -> None:
            if told is not None and all(job.done() for job in jobs):
                told("copy", unit.name, began, self.timed(self.stream))

        last.add_done_callback(done)

    def _ring_for(self, unit: Unit) -> Ring | None:
        """The staging ring for a unit that is not pinned, or None where it would not help."""
        if unit.home.pinned or unit.nbytes < SMALL or self.streams is None:
            return None
        if self._ring is None or (self._ring.largest < unit.nbytes and self._ring.chunk < CHUNK):
            self._make_ring(unit.nbytes)
        return self._ring

    def _make_ring(self, largest: int) -> None:
        if self._no_ring or self.streams is None:
            return
        if self._ring is not None:
            self._ring.close()
        self._ring = None
        try:
            self._ring = Ring(largest, self.streams)
        except backend.PinError as error:
            self._no_ring = True
            warn_unpinned(largest, error)
