"""Lanes: how units get onto the device and off it again.

A lane is one copy stream with the groups that share it. Bytes are copied ahead of time into slots; events, never the host, order the
copies against the computing stream. A lane without a stream copies when a group needs it, on the stream that computes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from . import idle
from .files import renew
from .homes import Keep
from .layout import align
from .order import Order, Pair
from .slots import Allowance, Arena, Buffer, Slot, whole
from .transfer import Transfer, wait_for
from .unit import Unit

if TYPE_CHECKING:
    from .groups import GroupState

logger = logging.getLogger("diffusers_offload_fix")

#: How many groups ahead are looked at; the arena's size is what really bounds it.
LOOKAHEAD = 64
#: A unit of at most so many bytes has device memory of its own, which a loop keeps: copying it costs more than it holds.
SMALL = 64 * 2**10


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
        looping: True in a forward that belongs to a loop (see `idle`): then slots outlive it.
        rested: when the last group was left, in seconds of `time.monotonic()`.
    """

    def __init__(self, device: torch.device, stream: Any, given: Any = None) -> None:
        self.device = device
        self.given = given
        self.stream = stream
        self.lock = threading.RLock()
        self.order = Order()
        self.groups: weakref.WeakSet[GroupState] = weakref.WeakSet()
        self.changed = True
        self.active: dict[GroupState, None] = {}
        self.looping = False
        self.rested = float("-inf")
        self.transfer = Transfer(device, stream)
        self._streams = self.transfer.streams
        self._between = True
        self._arena: Arena | None = None
        self._loaded: dict[Unit, None] = {}
        self._expected: deque[Any] = deque()
        self._horizon: Pair | None = None
        self._full = False
        self._allowance = Allowance()
        self._read: list[Any] = []

    def begin(self) -> None:
        """Before the first group of a forward."""
        if self._between:
            self._between = False
            self.looping = self.stream is not None and idle.in_loop()
            idle.make_way(self)
            if self.looping:
                # Not at the end of the forward before: whoever waits for the device there would wait for this copy too.
                self.prefetch()

    def acquire(self, unit: Unit, spanning: bool, graph: bool) -> None:
        """Loads a unit if need be and binds it.

        Args:
            spanning: the unit stays for a whole forward, so it must not sit in the arena.
            graph: autograd may save the tensors, so the memory must not be reused.
        """
        if not unit.bound:
            self._refresh(unit, graph)
            if unit.slot is None:
                self.transfer.hurry(unit)
                lasting = spanning or self._is_small(unit)
                self._load(unit, self._own_slot(unit, graph, lasting) if lasting or graph else self._slot(unit))
            self._arrive(unit)
            unit.began = self.transfer.timed(self._compute()) if self.stream is not None else None
            unit.bind(in_place=graph)
        unit.users += 1

    def _arrive(self, unit: Unit) -> None:
        slot = unit.slot
        try:
            self.transfer.collect(slot, unit)
        except BaseException:
            self._give(unit, None)
            raise
        if self._streams is not None:
            compute = self._streams.current()
            for event in slot.ready:
                compute.wait_event(event)
            slot.buffer.used_on(compute)
        if slot.ready:
            self._read = slot.ready

    def release(self, unit: Unit) -> None:
        """Offloads a unit when its last user lets go of it."""
        unit.users -= 1
        if unit.users:
            return
        changed = unit.unbind()
        compute = self._compute()
        self.transfer.tell("compute", unit, unit.began, compute)
        if self.looping and not changed and unit.slot.lasting:
            return
        self._give(unit, self._streams.mark(compute) if self.stream is not None and self._streams is not None else None)

    def prefetch(self) -> None:
        """Copies the units that are expected next, as far as the arena has room.

        A copy that fails here is made again when its group runs, and what is wrong then is raised there.
        """
        if self.stream is not None and not self._full:
            self._look_ahead()
            self.transfer.flush()

    def _look_ahead(self) -> None:
        for _ in range(LOOKAHEAD):
            found = self.order.after(self._horizon or self.order.now, self.looping)
            if found is None or found[0] in self._expected:
                return
            if not self._prefetch_group(found[0]):
                # Until a slot is given back there is nothing to try.
                self._full = True
                self._stage(*found)
                return
            self._expected.append(found[0])
            self._horizon = found[1]

    def entered(self, state: GroupState) -> None:
        """Notes that a group is on the device."""
        self.active[state] = None
        self.order.enter(state)
        if self._expected and self._expected[0] is state:
            self._expected.popleft()
        else:
            self._look_anew()

    def end(self, ahead: bool = True) -> None:
        """After the last group of a forward, or between two where none is active: nothing is bound.

        Outside a loop the host waits for the last copy of the forward here, once: a weight that is changed in place right after a
        forward must not be changed under a copy that the forward still reads. In a loop the next forward comes first.

        Args:
            ahead: whether to copy what is expected next, if the forward goes on.
        """
        if self.order.ended():
            self._between = True
        keeps = self.looping or not self._between
        if not keeps:
            self.finish()
        elif ahead and not self._between:
            self.prefetch()
        if keeps or self.transfer.busy:
            self.rested = time.monotonic()
            idle.rest(self)

    def finish(self) -> None:
        """Takes everything of this lane off the device."""
        # First, so that no thread waits with something else while the jobs of the loaded ones are collected.
        self._look_anew()
        for unit in list(self._loaded):
            self.drop(unit)
        if self._arena is not None and not self._arena.taken:
            self._arena.release()
        wait_for(self._read)
        self._read = []

    def clear(self, wait: bool = True) -> bool:
        """Takes everything off the device and ends the threads, unless a forward runs; False then.

        Args:
            wait: wait while another thread moves units of the lane. Not for a caller that holds another lane's lock.
        """
        if not self.lock.acquire(blocking=wait):
            return False
        try:
            if self.active:
                return False
            self.finish()
            self._between, self.looping = True, False
            self.transfer.close()
        finally:
            self.lock.release()
        return True

    def drop(self, unit: Unit) -> None:
        """Gives back the slot of a unit that is loaded but not bound."""
        self.transfer.unstage(unit)
        if unit.slot is not None and not unit.bound:
            # Nobody waits for this copy any more; what it raised would be raised by the next one that is needed.
            with contextlib.suppress(Exception):
                self.transfer.collect(unit.slot)
            # Whoever drops a copy may let go of the memory that it reads.
            wait_for(unit.slot.ready)
            self._give(unit, None)

    def _look_anew(self) -> None:
        """What was expected did not come, or is gone."""
        self.transfer.unstage()
        self._expected.clear()
        self._horizon = None
        self._full = False

    def _current_arena(self) -> Arena:
        """The arena, made anew if the units have changed and none of them sits in the old one."""
        if self._arena is not None and (self._arena.taken or not self.changed):
            return self._arena
        # Two of the largest units: one that computes and one that is being copied, as many as upstream holds.
        nbytes = 2 * max((align(unit.nbytes) for state in self.groups if not state.spanning for unit in state.units), default=0)
        if self._arena is None or self._arena.nbytes != nbytes:
            if self._arena is not None:
                self._arena.release()
            self._arena = Arena(nbytes, self.device)
        self.changed = False
        self._allowance = Allowance()
        return self._arena

    def _is_small(self, unit: Unit) -> bool:
        return self.stream is not None and unit.nbytes <= SMALL and self._allowance.covers(unit, unit.nbytes)

    def _refresh(self, unit: Unit, graph: bool) -> None:
        """Drops a copy that was made too early or must not be reused, and a home that the tensors have left."""
        intact = unit.intact() and not unit.home.worn
        if unit.slot is not None and (graph or not intact or unit.slot.stamp != unit.stamp()):
            self.drop(unit)
        if not intact:
            renew(unit, self.groups) if unit.keep is Keep.FILE else unit.make_home()

    def _prefetch_group(self, state: Any) -> bool:
        if state.spanning or state.passive:
            return True
        try:
            return all(unit.slot is not None or self._prefetch_unit(unit) for unit in state.units)
        except Exception as error:
            logger.debug("a copy ahead of time failed: %s", error)
            return False

    def _stage(self, state: Any, pair: Pair) -> None:
        """Has staging buffers filled with what comes after the groups that have found room."""
        for _ in range(LOOKAHEAD):
            waiting = [] if state.spanning or state.passive else [u for u in state.units if u.slot is None and not self._is_small(u)]
            if not all(map(self._stage_unit, waiting)):
                return
            found = self.order.after(pair, self.looping)
            if found is None:
                return
            state, pair = found

    def _stage_unit(self, unit: Unit) -> bool:
        unit.lane = self
        return self.transfer.stage(unit)

    def _prefetch_unit(self, unit: Unit) -> bool:
        if (slot := self._own_slot(unit, False, True) if self._is_small(unit) else self._take(unit)) is not None:
            self._load(unit, slot)
        return slot is not None

    def _slot(self, unit: Unit) -> Slot:
        if self.stream is None:
            return self._own_slot(unit)
        slot = self._take(unit)
        if slot is None:
            for other in list(self._loaded):
                if isinstance(other.slot.buffer, Arena):
                    self.drop(other)
            self._look_anew()
            slot = self._take(unit)
        return slot or self._own_slot(unit)

    def _take(self, unit: Unit) -> Slot | None:
        # A unit may have grown since (bitsandbytes makes more of a weight's state while it runs).
        if self._arena is not None and 2 * align(unit.nbytes) > self._arena.nbytes:
            self.changed = True
        try:
            arena = self._current_arena()
            fresh = arena.resume(self._compute(), self.stream)
        except RuntimeError:
            # Not even room for the arena: a unit that is needed now still may fit by itself.
            return None
        if fresh and self._streams is not None:
            self.stream.wait_event(self._streams.mark(self._compute()))
        return arena.take(unit.nbytes)

    def _own_slot(self, unit: Unit, graph: bool = False, lasting: bool = False) -> Slot:
        if graph:
            buffer = Buffer(unit.nbytes, self.device)
        else:
            if unit.buffer is None or unit.buffer.nbytes != unit.nbytes:
                unit.buffer = Buffer(unit.nbytes, self.device)
            buffer = unit.buffer
        buffer.resume(self._compute(), self.stream)
        slot = whole(buffer)
        slot.lasting = lasting and not graph
        slot.key = None if graph else slot.key
        if self.stream is not None and self._streams is not None:
            slot.waits = [self._streams.mark(self._compute())]
        return slot

    def _load(self, unit: Unit, slot: Slot) -> None:
        slot.stamp = unit.stamp()
        unit.slot, unit.lane = slot, self
        self._loaded[unit] = None
        try:
            self.transfer.start(unit, slot)
        except BaseException:
            self._give(unit, None)
            raise

    def _give(self, unit: Unit, used: Any) -> None:
        slot, unit.slot = unit.slot, None
        self._loaded.pop(unit, None)
        self._full = False
        if isinstance(slot.buffer, Arena):
            slot.buffer.give(slot, slot.ready if used is None else [used])
        elif slot.buffer is unit.buffer:
            if used is None and self._streams is not None:
                for event in slot.ready:
                    self._streams.current().wait_event(event)
            slot.buffer.release()

    def _compute(self) -> Any:
        return self._streams.current() if self._streams is not None else None
