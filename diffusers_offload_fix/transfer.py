"""Transfers: the copies of one lane, from host memory into slots.

Pinned memory is copied on the lane's stream. Any other passes through the staging ring, whose threads issue the copies. Where there is
no copy stream the host waits for each copy, as it does upstream: the weights may be changed as soon as the call returns.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import backend
from .homes import Home, warn_unpinned
from .sending import Sending
from .slots import Slot
from .staging import CHUNK, READERS, WORKERS, Ring, refuse_all
from .unit import Unit

#: Bytes under which a copy from unpinned memory is left to the driver.
SMALL = 64 * 2**10

#: Told of every copy and of every stay on the device, for a picture of what overlaps: `trace(what, unit, start, end)`, where `what`
#: is "copy" or "compute" and `start` and `end` are timed events.
trace: Callable[[str, str, Any, Any], None] | None = None


class _Staged(NamedTuple):
    sending: Sending
    stamp: list[int]
    load: int


class Transfer:
    """Issues the copies to `device`, on `stream` or, where that is None, on the stream that computes.

    Attributes:
        streams: streams and events of the device, or None where copies cannot overlap.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.stream = stream
        self.streams = backend.Streams(device) if backend.has_streams(device) else None
        self._rings: dict[bool, Ring] = {}
        self._no_ring = False
        self._staged: dict[Unit, _Staged] = {}
        # By themselves: a thread that waits for room must not keep the model alive.
        self._waiting: set[Sending] = set()
        weakref.finalize(self, refuse_all, self._waiting)

    def start(self, unit: Unit, slot: Slot) -> None:
        """Starts copying the unit's home into the slot."""
        ring = self._ring_for(unit)
        if self.streams is None:
            unit.home.copy_to(slot.memory, non_blocking=False)
        elif self.stream is None:
            self._at_once(unit.home, slot, ring)
        elif ring is not None:
            began = self.timed(self.stream)
            if not self._was_staged(unit, slot):
                slot.sending = ring.send(unit.home, self.stream, slot.memory, slot.waits)
            if trace is not None:
                self._tell_sent(unit, slot.sending, began)
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
        sending = ring.send(home, self.streams.current(), slot.memory)
        ring.flush()
        sending.done.result().synchronize()

    def stage(self, unit: Unit) -> bool:
        """Fills staging buffers with a unit for which the device has no room yet; False if there is nothing or no one to fill."""
        # What was staged and is no longer intact is found out when its group runs.
        if unit in self._staged:
            return True
        ring = self._ring_for(unit)
        if ring is None or not unit.intact():
            return False
        loads = {held.load: held.sending.pieces for held in self._staged.values()}
        if sum(loads.values()) >= ring.ahead and not ring.has_room(unit.home, self.stream):
            return False
        sending = ring.send(unit.home, self.stream)
        self._waiting.add(sending)
        self._staged[unit] = _Staged(sending, unit.stamp(), ring.opened)
        return True

    def flush(self) -> None:
        """Hands everything that was started or staged to the threads."""
        for ring in self._rings.values():
            ring.flush()

    def unstage(self, unit: Unit | None = None) -> None:
        """Forgets what was staged, for one unit or for all: its buffers are free again."""
        for one in [unit] if unit is not None else list(self._staged):
            held = self._staged.pop(one, None)
            if held is not None:
                self._waiting.discard(held.sending)
                held.sending.refuse()

    def _was_staged(self, unit: Unit, slot: Slot) -> bool:
        held = self._staged.pop(unit, None)
        if held is None:
            return False
        sending = held.sending
        self._waiting.discard(sending)
        if sending.home is not unit.home or held.stamp != slot.stamp:
            # Other bytes by now.
            sending.refuse()
        # A thread may have given up.
        given = sending.wanted and sending.give(slot.memory, slot.waits)
        slot.sending = sending if given else None
        return given

    def hurry(self, unit: Unit) -> None:
        """Told that a unit is needed now: threads that hold something else in staging are free for it."""
        if unit not in self._staged:
            self.unstage()

    def collect(self, slot: Slot, unit: Unit | None = None) -> None:
        """Waits until the ring has issued the slot's copies; its error, if there was one, is raised here.

        Args:
            unit: what is copied once more if a thread gave up waiting for the slot; None if the copy is not needed any more.
        """
        sending, slot.sending = slot.sending, None
        if sending is None:
            return
        self.flush()
        try:
            event = sending.done.result()
        except BaseException:
            # No thread may still write into a slot that is given back.
            with contextlib.suppress(Exception):
                sending.done.result()
            raise
        slot.ready = [] if event is None else [event]
        if event is None and unit is not None:
            self.start(unit, slot)
            self.collect(slot, unit)

    @property
    def busy(self) -> bool:
        """True while a ring has threads."""
        return any(ring.running for ring in self._rings.values())

    def close(self) -> None:
        """Ends the threads of the rings."""
        self.unstage()
        for ring in self._rings.values():
            ring.close()

    def timed(self, stream: Any) -> Any:
        """A timed event if somebody traces."""
        return self.streams.mark(stream, timed=True) if trace is not None and self.streams is not None else None

    def tell(self, what: str, unit: Unit, began: Any, stream: Any) -> None:
        """Tells the trace of something that began at the event `began` and ends here."""
        if trace is not None and began is not None:
            trace(what, unit.name, began, self.timed(stream))

    def _tell_sent(self, unit: Unit, sending: Sending, began: Any) -> None:
        told = trace

        def done(_: Any) -> None:
            if told is not None:
                told("copy", unit.name, began, self.timed(self.stream))

        sending.done.add_done_callback(done)

    def _ring_for(self, unit: Unit) -> Ring | None:
        """The staging ring for a unit that is not pinned, or None where it would not help."""
        if unit.home.pinned or (unit.nbytes < SMALL and not unit.home.is_file) or self.streams is None:
            return None
        ring = self._rings.get(unit.home.is_file)
        if ring is None or (ring.largest < unit.nbytes and ring.chunk < CHUNK):
            ring = self._make_ring(unit.nbytes, unit.home.is_file)
        return ring

    def _make_ring(self, largest: int, is_file: bool) -> Ring | None:
        if self._no_ring or self.streams is None:
            return None
        self.unstage()
        if old := self._rings.pop(is_file, None):
            old.close()
        try:
            ring = self._rings[is_file] = Ring(largest, self.streams, READERS if is_file else WORKERS)
        except backend.PinError as error:
            self._no_ring = True
            warn_unpinned(largest, error)
            return None
        return ring


def wait_for(events: list[Any]) -> None:
    """Makes the host wait for events that have not happened yet."""
    for event in events:
        if not event.query():
            event.synchronize()
