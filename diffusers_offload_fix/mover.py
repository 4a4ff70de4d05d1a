"""Entering and leaving groups: what happens around the forward of a module that is group-offloaded."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import enabling, training
from .files import write_all
from .groups import GroupState, quiet
from .homes import Keep
from .lane import Lane
from .structure import unique

#: Told to whoever runs a backward pass that cannot be supported, before it has changed anything.
BACKWARD = (
    "A backward pass reached the group-offloaded module {name}, which does not support it: {why}. Run the forward under "
    "torch.no_grad() or torch.inference_mode(), or train without group offloading."
)


def begin(state: GroupState, inputs: Any = None) -> None:
    """Before a module of the group runs: enters the group, and sees to what autograd saves of it."""
    enter(state, inputs)
    if torch.is_grad_enabled() and not state.passive:
        try:
            training.begin(state)
        except BaseException:
            abandon(state)
            raise


def enter(state: GroupState, inputs: Any = None) -> None:
    """Brings the group to the device, ready for the stream that computes. Harmless if it is there already."""
    if state.passive:
        return
    if state.root is not None:
        state.root.refresh()
    graph = torch.is_grad_enabled() and training.makes_graph(state, tree_leaves(inputs))
    with quiet():
        lane = _planned(state)
        with lane.lock:
            if state.active and graph and not state.graph and not state.running:
                # Memory that is used again is no place for what a graph may save.
                _deactivate(lane, state)
            if not state.active:
                _evict_idle(lane, state)
                _activate(lane, state, graph)
            state.running += 1
            if not graph:
                lane.prefetch()


def leave(state: GroupState, module: torch.nn.Module, output: Any = None) -> None:
    """Takes the group off the device if `module` is the one after which it is not needed any more."""
    if state.passive:
        return
    _end_graph(state, output)
    lane = state.lane
    if lane is None:
        return
    with quiet(), lane.lock:
        state.running = max(0, state.running - 1)
        if module is state.leader and state.active and not state.held:
            offload(lane, state)


def release(state: GroupState, output: Any = None) -> None:
    """Takes the group off the device, whichever of its modules brought it and made `output`."""
    lane = state.lane
    if state.passive or lane is None:
        return
    _end_graph(state, output)
    with quiet(), lane.lock:
        state.running = 0
        if state.active:
            offload(lane, state)


def abandon(state: GroupState) -> None:
    """After an exception: takes the group, and every group that was entered inside it, off the device."""
    lane = state.lane
    if state.passive or lane is None:
        return
    if torch.is_grad_enabled():
        training.end()
    with quiet(), lane.lock:
        for other in [*_entered_inside(lane, state), *([state] if state.active else [])]:
            _deactivate(lane, other)
        lane.order.edge()
        lane.clear()


def park(state: GroupState) -> None:
    """Makes the group's home and takes it off the device: what enabling does, and upstream's `offload_`."""
    if state.passive:
        return
    with quiet():
        lane = _planned(state)
        with lane.lock:
            if state.active:
                offload(lane, state)
            if enabling.takes(state):
                return
            for unit in state.units:
                unit.settle()


def settle(states: list[GroupState]) -> None:
    """Makes the homes of many groups, those in files in as few files as there are folders.

    Raises:
        DiskError: a file could not be made; every weight is where it was.
    """
    with quiet(), contextlib.ExitStack() as locks:
        for lane in sorted({_planned(state) for state in states}, key=id):
            locks.enter_context(lane.lock)
        units = unique(unit for state in states for unit in state.units)
        write_all(unit for unit in units if unit.keep is Keep.FILE and not unit.bound and not unit.intact())
        for unit in units:
            unit.settle()


def offload(lane: Lane, state: GroupState) -> None:
    """Takes an active group off the device; the end of a spanning group is the end of a forward."""
    if state.spanning:
        # Whatever was entered inside and not left (its last module did not run) has no business outside.
        for other in _entered_inside(lane, state):
            _deactivate(lane, other)
    _deactivate(lane, state)
    if lane.active:
        # After the last group of a forward there is nothing to copy for it; what the next one needs is copied when it begins.
        if not state.graph and not lane.order.ended():
            lane.prefetch()
        return
    if state.spanning:
        lane.order.edge()
    lane.end(ahead=not state.graph)


def _entered_inside(lane: Lane, state: GroupState) -> list[GroupState]:
    """The groups that this thread entered after `state` and that are still there, last first."""
    active = list(lane.active)
    if state not in lane.active:
        return []
    return [other for other in reversed(active[active.index(state) + 1 :]) if other.thread == state.thread]


def retire(state: GroupState) -> None:
    """Lets go of a group whose hook is removed; its tensors stay ordinary tensors on the offload device."""
    lane = state.lane
    if lane is not None:
        with quiet(), lane.lock:
            if state.active:
                _deactivate(lane, state)
            for unit in state.units:
                lane.drop(unit)
            if not lane.active:
                lane.finish()
    state.retire()


def _planned(state: GroupState) -> Lane:
    if not state.active and not state.current():
        state.plan()
    assert state.lane is not None
    return state.lane


def _activate(lane: Lane, state: GroupState, graph: bool) -> None:
    if not lane.active:
        if state.spanning:
            lane.order.edge()
        lane.begin()
    state.mark_volatile()
    done = []
    try:
        for unit in state.units:
            lane.acquire(unit, state.spanning, graph)
            done.append(unit)
    except BaseException:
        # Nothing half-moved stays behind: the weights are on the host as before.
        for unit in done:
            lane.release(unit)
        lane.clear()
        raise
    state.active, state.graph, state.thread = True, graph, threading.get_ident()
    lane.entered(state)


def _deactivate(lane: Lane, state: GroupState) -> None:
    lane.active.pop(state, None)
    state.active, state.running = False, 0
    for unit in state.units:
        if unit.bound:
            lane.release(unit)
    state.take_replaced()


def _evict_idle(lane: Lane, coming: GroupState) -> None:
    """Offloads groups none of whose modules runs: their last module was skipped or ran out of order."""
    for state in list(lane.active):
        if not state.running and state is not coming:
            _deactivate(lane, state)


def _end_graph(state: GroupState, output: Any) -> None:
    if torch.is_grad_enabled():
        training.end()
        _guard_backward(state, output)


def _guard_backward(state: GroupState, output: Any) -> None:
    """Makes a backward pass that cannot be supported fail with a reason instead of a device mismatch or a wrong gradient (T1)."""
    why = training.refusal(state) if state.graph else None
    if why is None:
        return
    message = BACKWARD.format(name=type(state.leader).__name__, why=why)

    def refuse(_: Any) -> None:
        raise RuntimeError(message)

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(refuse)
