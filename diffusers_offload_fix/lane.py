"""Lanes: how units get onto the device and off it again.

A lane is one copy stream with the groups that share it. Bytes are copied ahead of time into slots; events, never the host, order the
copies against the computing stream. A lane without a stream copies when a group needs it, on the stream that computes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from . import backend
from .files import renew
from .homes import Keep, warn_unpinned
from .layout import align
from .order import Order
from .slots import Arena, Buffer, Slot, whole
from .staging import CHUNK, Ring
from .unit import Unit

if TYPE_CHECKING:
    from .groups import GroupState

logger = logging.getLogger("diffusers_offload_fix")

#: How many groups ahead are looked at; the arena's size is what really bounds it.
LOOKAHEAD = 64
#: Bytes under which a copy from unpinned memory is left to the driver.
SMALL = 64 * 2**10


#: Told of every copy and of every stay on the device, for a picture of what overlaps: `trace(what, unit, start, end)`, where `what`
#: is "copy" or "compute" and `start` and `end` are timed events. It may be called from the staging thread.
trace: Callable[[str, str, Any, Any], None] | None = None


class Lane:
    """The units of one device that are copied by one stream.

    Args:
        device: where units are loaded to, with its index.
        stream: the copy stream, or None to copy on the computing stream.
        given: the stream object that upstream made.

    Attributes:
        lock: held by whoever moves units of the lane.
        groups: the groups that use the lane.
        active: the groups that are on the device, in the order in which they were entered.
        changed: True if units came or went since the arena was made.
    """

    def __init__(self, device: torch.device, stream: Any, given: Any = None) -> None:
        self.device = device
        self.given = given
        self.stream = stream
        self.lock = threading.RLock()
        self.order = Order()
        self.groups: weakref.WeakSet[GroupState] = weakref.WeakSet()
        self.changed = True
        self._streams = backend.Streams(device) if backend.has_streams(device) else None
        self._arena: Arena | None = None
        self.active: dict[GroupState, None] = {}
        self._loaded: dict[Unit, None] = {}
        self._last_copy: Any = None
        self._ring: Ring | None = None
        self._no_ring = False
        self._executor: ThreadPoolExecutor | None = None
        self._executor_pid = 0

    def acquire(self, unit: Unit, spanning: bool, graph: bool) -> None:
        """Loads a unit if need be and binds it.

        Args:
            spanning: the unit stays for a whole forward, so it must not sit in the arena.
            graph: autograd may save the tensors, so the memory must not be reused.
        """
        if not unit.bound:
            self._refresh(unit, graph)
            if unit.slot is None:
                self._load(unit, self._own_slot(unit, graph) if spanning or graph else self._slot(unit))
            self._arrive(unit)
            unit.began = self._timed(self._compute()) if self.stream is not None else None
            unit.bind(in_place=graph)
        unit.users += 1

    def _arrive(self, unit: Unit) -> None:
        try:
            self._collect(unit.slot)
        except BaseException:
            self._give(unit, None)
            raise
        self._wait_for(unit.slot)

    def release(self, unit: Unit) -> None:
        """Offloads a unit when its last user lets go of it."""
        unit.users -= 1
        if unit.users:
            return
        unit.unbind()
        self._tell("compute", unit, unit.began, self._compute())
        self._give(unit, self._mark_compute())

    def prefetch(self) -> None:
        """Copies the units that are expected next, as far as the arena has room.

        A copy that fails here is made again when its group runs, and what is wrong then is raised there.
        """
        if self.stream is None:
            return
        try:
            for ahead, state in enumerate(self.order.ahead()):
                if ahead == LOOKAHEAD or not self._prefetch_group(state):
                    return
        except Exception as error:
            logger.debug("a copy ahead of time failed: %s", error)

    def finish(self) -> None:
        """Ends a forward: nothing of this lane stays on the device, and no thread runs.

        The host waits for the last copy here, once: a weight that is changed in place right after a forward must not be changed under
        a copy that still reads it.
        """
        self._drop_unbound()
        self._finish_jobs()
        if self._last_copy is not None and not self._last_copy.query():
            self._last_copy.synchronize()
        self._last_copy = None
        if self._arena is not None and not self._arena.taken:
            self._arena.release()

    def drop(self, unit: Unit) -> None:
        """Gives back the slot of a unit that is loaded but not bound."""
        if unit.slot is not None and not unit.bound:
            # Nobody waits for this copy any more; what it raised would be raised by the next one that is needed.
            with contextlib.suppress(Exception):
                self._collect(unit.slot)
            self._give(unit, None)

    def idle(self) -> bool:
        """True if no unit is bound and no copy is expected."""
        return not any(unit.bound for unit in self._loaded) and next(iter(self.order.ahead()), None) is None

    def _current_arena(self) -> Arena:
        """The arena, made anew if the units have changed and none of them sits in the old one."""
        if self._arena is not None and (self._arena.taken or not self.changed):
            return self._arena
        nbytes = self._arena_size()
        if self._arena is None or self._arena.nbytes != nbytes:
            if self._arena is not None:
                self._arena.release()
            self._arena = Arena(nbytes, self.device)
        self.changed = False
        return self._arena

    def _arena_size(self) -> int:
        # Two of the largest units: one that computes and one that is being copied, as many as upstream holds.
        sizes = [align(unit.nbytes) for state in self.groups if not state.spanning for unit in state.units]
        return 2 * max(sizes, default=0)

    def _refresh(self, unit: Unit, graph: bool) -> None:
        """Drops a copy that was made too early or must not be reused, and a home that the tensors have left."""
        intact = unit.intact() and not unit.home.worn
        if unit.slot is not None and (graph or not intact or unit.slot.stamp != unit.stamp()):
            self.drop(unit)
        if not intact:
            renew(unit, self.groups) if unit.keep is Keep.FILE else unit.make_home()

    def _drop_unbound(self) -> None:
        for unit in list(self._loaded):
            self.drop(unit)

    def _prefetch_group(self, state: Any) -> bool:
        if state.spanning or state.passive:
            return True
        return all(unit.slot is not None or self._prefetch_unit(unit) for unit in state.units)

    def _prefetch_unit(self, unit: Unit) -> bool:
        slot = self._take(unit)
        if slot is not None:
            self._load(unit, slot)
        return slot is not None

    def _slot(self, unit: Unit) -> Slot:
        if self.stream is None:
            return self._own_slot(unit, False)
        slot = self._take(unit)
        if slot is None:
            self._drop_unbound()
            slot = self._take(unit)
        return slot or self._own_slot(unit, False)

    def _take(self, unit: Unit) -> Slot | None:
        try:
            arena = self._current_arena()
            fresh = arena.resume(self._compute(), self.stream)
        except RuntimeError:
            # Not even room for the arena: a unit that is needed now still may fit by itself.
            return None
        if fresh:
            self.stream.wait_event(self._mark_compute())
        return arena.take(unit.nbytes)

    def _own_slot(self, unit: Unit, graph: bool) -> Slot:
        if graph:
            buffer = Buffer(unit.nbytes, self.device)
            buffer.resume(self._compute(), self.stream)
            slot = whole(buffer)
            slot.key = None
            slot.waits = [self._mark_compute()] if self.stream is not None else []
            return slot
        if unit.buffer is None or unit.buffer.nbytes != unit.nbytes:
            unit.buffer = Buffer(unit.nbytes, self.device)
        unit.buffer.resume(self._compute(), self.stream)
        slot = whole(unit.buffer)
        if self.stream is not None:
            slot.waits = [self._mark_compute()]
        return slot

    def _load(self, unit: Unit, slot: Slot) -> None:
        slot.stamp = unit.stamp()
        unit.slot, unit.lane = slot, self
        self._loaded[unit] = None
        try:
            self._copy(unit, slot)
        except BaseException:
            self._give(unit, None)
            raise

    def _copy(self, unit: Unit, slot: Slot) -> None:
        ring = self._ring_for(unit)
        if self._streams is None:
            unit.home.copy_to(slot.memory, non_blocking=False)
        elif self.stream is None:
            self._load_now(unit, slot, ring)
        elif ring is not None:
            slot.job = self._worker().submit(self._stage, unit, slot, ring)
        else:
            self._wait_for_free(slot)
            began = self._timed(self.stream)
            with self._streams.on(self.stream):
                unit.home.copy_to(slot.memory, non_blocking=True)
            slot.ready = self._last_copy = self._streams.mark(self.stream)
            self._tell("copy", unit, began, self.stream)

    def _load_now(self, unit: Unit, slot: Slot, ring: Ring | None) -> None:
        # Where there is no copy stream the host waits, as it does upstream: the weights may be changed as soon as this returns.
        if ring is None:
            unit.home.copy_to(slot.memory, non_blocking=False)
        else:
            ring.send(unit.home, slot.memory, self._compute())

    def _stage(self, unit: Unit, slot: Slot, ring: Ring) -> Any:
        # On the worker thread, which has modes of its own.
        with torch.no_grad():
            self._wait_for_free(slot)
            began = self._timed(self.stream)
            ready = ring.send(unit.home, slot.memory, self.stream)
            self._tell("copy", unit, began, self.stream)
            return ready

    def _timed(self, stream: Any) -> Any:
        return self._streams.mark(stream, timed=True) if trace is not None and self._streams is not None else None

    def _tell(self, what: str, unit: Unit, began: Any, stream: Any) -> None:
        if trace is not None and began is not None:
            trace(what, unit.name, began, self._timed(stream))

    def _wait_for_free(self, slot: Slot) -> None:
        for event in slot.waits:
            self.stream.wait_event(event)

    def _ring_for(self, unit: Unit) -> Ring | None:
        """The staging ring for a unit that is not pinned, or None where it would not help."""
        if unit.home.pinned or (unit.nbytes < SMALL and not unit.home.is_file) or self._streams is None:
            return None
        if self._ring is None or (self._ring.largest < unit.nbytes and self._ring.chunk < CHUNK):
            self._make_ring(unit.nbytes)
        return self._ring

    def _make_ring(self, largest: int) -> None:
        if self._no_ring or self._streams is None:
            return
        self._finish_jobs()
        self._ring = None
        try:
            self._ring = Ring(largest, self._streams)
        except backend.PinError as error:
            self._no_ring = True
            warn_unpinned(largest, error)

    def _worker(self) -> ThreadPoolExecutor:
        # A thread does not survive a fork; it lives for one forward, so none outlives the model or holds up the interpreter's exit.
        if self._executor is None or self._executor_pid != os.getpid():
            self._executor = ThreadPoolExecutor(1, "offload-staging")
            self._executor_pid = os.getpid()
        return self._executor

    def _finish_jobs(self) -> None:
        if self._executor is not None and self._executor_pid == os.getpid():
            self._executor.shutdown()
        self._executor = None

    def _collect(self, slot: Slot) -> None:
        """Waits until the worker has issued the slot's copies; its error, if there was one, is raised here."""
        job, slot.job = slot.job, None
        if job is not None:
            slot.ready = self._last_copy = job.result()

    def _wait_for(self, slot: Slot) -> None:
        compute = self._compute()
        if slot.ready is not None:
            compute.wait_event(slot.ready)
        slot.buffer.used_on(compute)

    def _give(self, unit: Unit, used: Any) -> None:
        slot, unit.slot = unit.slot, None
        self._loaded.pop(unit, None)
        if isinstance(slot.buffer, Arena):
            slot.buffer.give(slot, [event for event in (used, slot.ready) if event is not None])
        elif slot.buffer is unit.buffer:
            if used is None and slot.ready is not None:
                self._compute().wait_event(slot.ready)
            slot.buffer.release()

    def _compute(self) -> Any:
        return self._streams.current() if self._streams is not None else None

    def _mark_compute(self) -> Any:
        if self.stream is None or self._streams is None:
            return None
        return self._streams.mark(self._streams.current())
