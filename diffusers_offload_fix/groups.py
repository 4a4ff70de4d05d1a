"""What the plugin knows of one `ModuleGroup`: its tensors, its units, its lane, and whether it is on the device."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import backend
from .homes import Keep
from .lane import Lane
from .structure import Structure, unique
from .unit import Entry, Unit

#: Where a `ModuleGroup` keeps its state.
ATTRIBUTE = "_offload_fix"
#: Upstream's names of the hooks that belong to group offloading; the first one has the group.
HOOK = "group_offloading"
HOOKS = (HOOK, "lazy_prefetch_group_offloading", "layer_execution_tracker")

#: Held while groups, entries and units are planned.
_planning = threading.RLock()
_entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
_lanes: weakref.WeakValueDictionary[tuple[int, torch.device], Lane] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
#: Counts the groups that came and went: a plan that was made under another count may be out of date.
_epoch = 0


class GroupState:
    """The plugin's half of a `ModuleGroup`.

    Attributes:
        units: the units that the group needs on the device to run.
        active: True while they are there for this group.
        running: how many of the group's modules are in their forward now.
        thread: the thread that entered the group.
        spanning: True if the group is on the device while other groups come and go (the root of a model).
        passive: True if there is nowhere to move to (the onload device is the offload device).
        folder: where the group's file is wanted, or None for a group that is kept in memory.
        held: True while a module that is not the leader keeps the group on the device.
        handles: of the hooks on modules that may be run by themselves.
        root: for the group of a whole model: what looks for modules that nobody covers.
        graph: True while the group is on the device for a forward that autograd may save from.
    """

    def __init__(self, group: Any) -> None:
        self.leader: torch.nn.Module = group.offload_leader
        self.modules: list[torch.nn.Module] = list(group.modules)
        self.loose: list[Tensor] = [*group.parameters, *group.buffers]
        self.device = backend.resolve(group.onload_device)
        self.offload_device = torch.device(group.offload_device)
        self.passive = self.device == backend.resolve(self.offload_device)
        self.low_cpu_mem_usage = bool(group.low_cpu_mem_usage)
        folder = getattr(group, "offload_to_disk_path", None)
        self.folder: str | None = os.fspath(folder) if folder else None
        self.stream = group.stream
        self.non_blocking = bool(group.non_blocking)
        self.spanning = False
        self.units: list[Unit] = []
        self.active = False
        self.running = 0
        self.thread = 0
        self.lane: Lane | None = None
        self.held = False
        self.handles: list[Any] = []
        self.root: Any = None
        self.graph = False
        self._entries: list[Entry] = []
        self._structure: Structure | None = None
        self._epoch = -1
        weakref.finalize(self, _bump).atexit = False
        _bump()

    def plan(self) -> None:
        """Brings tensors and units up to date with the modules and with the other groups."""
        with _planning:
            if self._structure is None or not self._structure.intact():
                self._claim()
            if self._epoch != _epoch:
                self._choose_lane()
                self._partition()
                self._epoch = _epoch

    def current(self) -> bool:
        """True if `plan` would change nothing."""
        return self._epoch == _epoch and self._structure is not None and self._structure.intact()

    def forget_structure(self) -> None:
        """Has the tensors read again before the next use: the group has other modules now."""
        self._structure = None

    def retire(self) -> None:
        """Lets go of the tensors: the group's hook was removed."""
        self.detach()
        for entry in self._entries:
            entry.claims.discard(self)
        if self.lane is not None:
            self.lane.order.forget(self)
            self.lane.groups.discard(self)
            self.lane.changed = True
        self._entries, self._structure, self.units, self._epoch, self.root = [], None, [], -1, None
        _bump()

    def detach(self) -> None:
        """Stops watching modules that may be run by themselves."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @property
    def entries(self) -> list[Entry]:
        """The tensors that the group claims."""
        return list(self._entries)

    def _claim(self) -> None:
        if self._structure is not None:
            self.loose = self._structure.loose_now()
        self._structure = Structure(self.modules, self.loose, self.leader)
        for entry in self._entries:
            entry.claims.discard(self)
        self._entries = [_entry_of(tensor) for tensor in self._structure.tensors]
        for entry in self._entries:
            entry.claims.add(self)
            entry.owner = self._structure.owners.get(id(entry.tensor), entry.owner)
        _bump()

    def _partition(self) -> None:
        """Units so that each is needed as a whole by every group that needs any of it."""
        parts: dict[frozenset[int], list[Entry]] = {}
        for entry in self._entries:
            parts.setdefault(frozenset(map(id, entry.claims)), []).append(entry)
        self.units = [self._unit(entries, *_keep(entries[0].claims)) for entries in parts.values()]
        for unit in self.units:
            unit.name = unit.name or f"{type(self.leader).__name__} {next(_numbers)}"
        if self.lane is not None:
            self.lane.changed = True

    def memory_keep(self) -> Keep:
        """How the group would be kept in memory."""
        if self.lane is None or self.lane.stream is None:
            return Keep.AS_IS
        return Keep.SLAB if self.low_cpu_mem_usage else Keep.PINNED

    def _unit(self, entries: list[Entry], keep: Keep, folder: str | None) -> Unit:
        unit = entries[0].unit
        fits = unit is not None and unit.device == self.device and unit.offload_device == self.offload_device
        if unit is not None and fits and (unit.keep, unit.folder) == (keep, folder) and same(unit.entries, entries):
            return unit
        for old in unique(entry.unit for entry in entries if entry.unit is not None):
            if old.bound:
                raise RuntimeError(
                    "A tensor of this group is on the device for another group, and the groups changed in the middle of a "
                    "forward. Change modules between forwards, not inside one."
                )
            if old.lane is not None:
                old.lane.drop(old)
        return Unit(entries, self.device, self.offload_device, keep, folder)

    def _choose_lane(self) -> None:
        followers = [] if self.stream is not None else list(_streamed_below(self.leader, self))
        self.spanning = bool(followers) or any(True for _ in _hooked_below(self.leader, self))
        stream = self.stream if self.stream is not None else next((state.stream for state in followers), None)
        if followers:
            self.low_cpu_mem_usage = any(state.low_cpu_mem_usage for state in followers)
        lane = lane_of(self.device, stream)
        if self.lane is not lane:
            if self.lane is not None:
                self.lane.groups.discard(self)
                self.lane.order.forget(self)
            self.lane = lane
        lane.groups.add(self)

    def mark_volatile(self) -> None:
        """Notes which entries have to be copied back whatever their version says."""
        volatile = self._structure.volatile() if self._structure is not None else set()
        for unit in self.units:
            unit.volatile = volatile

    def take_replaced(self) -> None:
        """Brings buffers that forward put in the place of others to the offload device; the next plan adopts them."""
        for buffer in self._structure.replaced_buffers() if self._structure is not None else ():
            if buffer.device == self.device:
                buffer.data = buffer.data.to(self.offload_device)


def _keep(claims: Iterable[GroupState]) -> tuple[Keep, str | None]:
    """How a unit is kept, and in which folder: the same answer whichever of the groups that need it is asked.

    What a group in memory needs is in memory; of several ways, the one that loads fastest.
    """
    folders = {state.folder for state in claims}
    named = sorted(folder for folder in folders if folder is not None)
    if None not in folders:
        return Keep.FILE, named[0]
    return min((state.memory_keep() for state in claims if state.folder is None), key=list(Keep).index), None


def same(one: list[Entry], other: list[Entry]) -> bool:
    """True for the same entries in any order."""
    return len(one) == len(other) and set(map(id, one)) == set(map(id, other))


def _entry_of(tensor: Tensor) -> Entry:
    entry = _entries.get(id(tensor))
    if entry is None:
        entry = _entries[id(tensor)] = Entry(tensor)
    return entry


def _bump() -> None:
    global _epoch
    _epoch += 1


def state_of(group: Any) -> GroupState | None:
    """The state of a `ModuleGroup`, or None if the plugin does not move it."""
    state: GroupState | None = getattr(group, ATTRIBUTE, None)
    return state


def group_hooks(module: torch.nn.Module) -> Any:
    """The group offloading hook of one module, or None."""
    registry = module.__dict__.get("_diffusers_hook")
    return None if registry is None else registry.hooks.get(HOOK)


def state_at(module: torch.nn.Module) -> GroupState | None:
    """The state of the group of one module's own hook, or None."""
    hook = group_hooks(module)
    return None if hook is None else state_of(hook.group)


def _hooked_below(leader: torch.nn.Module, but: GroupState) -> Iterator[GroupState]:
    for module in leader.modules():
        state = state_at(module) if module is not leader else None
        if state is not None and state is not but:
            yield state


def _streamed_below(leader: torch.nn.Module, but: GroupState) -> Iterator[GroupState]:
    return (state for state in _hooked_below(leader, but) if state.stream is not None)


def lane_of(device: torch.device, stream: Any) -> Lane:
    """The lane for groups that were given `stream` (any object that upstream made, or None).

    The stream that upstream made is used only if it is on the device: upstream makes it on the current one (M2).
    """
    with _planning:
        key = (id(stream), device)
        lane = _lanes.get(key)
        if lane is None:
            own = stream
            if stream is not None and backend.stream_device(stream, device) != device:
                own = backend.Streams(device).new()
            # The lane keeps `stream` alive, so that its id stays its own.
            lane = _lanes[key] = Lane(device, own, given=stream)
        return lane


class quiet:
    """Moving weights is no part of the user's computation: no graph, no inference tensors, no torch function (Q14)."""

    # Entered twice a group and forward, so it does without the generators behind torch's own contexts.
    __slots__ = ("_function", "_grad", "_inference")

    def __enter__(self) -> None:
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._function = torch._C.DisableTorchFunctionSubclass()
        self._function.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._function.__exit__(*error)
        torch._C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(*error)
