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
from torch.nn.modules.batchnorm import _NormBase

from . import backend, casting
from .homes import Keep
from .lane import Lane
from .tree import is_peculiar
from .unit import Entry, Unit
from .watch import is_counted

#: Where a `ModuleGroup` keeps its state.
ATTRIBUTE = "_offload_fix"

#: Held while groups, entries and units are planned.
_planning = threading.RLock()
_entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
_lanes: weakref.WeakValueDictionary[tuple[int, torch.device], Lane] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
#: Counts the groups that came and went: a plan that was made under another count may be out of date.
_epoch = 0


class Structure:
    """The tensors of some modules, and a cheap way to tell whether the modules still have the same ones.

    Args:
        modules: modules whose parameters and buffers all belong to the group.
        loose: single tensors that belong to it.
        leader: the module under which the loose tensors hang; they are looked up by place, so that a replaced one is found.
    """

    def __init__(self, modules: list[torch.nn.Module], loose: list[Tensor], leader: torch.nn.Module) -> None:
        self._full: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._empty: list[dict[str, Any]] = []
        self._buffers: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._norms: list[_NormBase] = []
        self.owners: dict[int, torch.nn.Module] = {}
        for module in unique(part for root in modules for part in root.modules()):
            self._note(module)
        self._places = _places(loose, leader)
        self._loose = loose
        self._own: list[Tensor] = []
        if all(leader is not module for module in modules):
            self._note_own(leader)
        self.tensors: list[Tensor] = unique(self._collect(modules))
        self._untold = {id(t) for module in modules for t in module.buffers() if not is_counted(t)}

    def _note(self, module: torch.nn.Module) -> None:
        for table in (module._parameters, module._buffers, module._modules):
            if table:
                self._full.append((table, ids_of(table)))
            else:
                self._empty.append(table)
        if module._buffers:
            self._buffers.append((module._buffers, ids_of(module._buffers)))
        self.owners.update({id(p): module for p in module._parameters.values() if is_peculiar(p)})
        self._note_norm(module)
        registry = module.__dict__.get("_diffusers_hook")
        if registry is not None and "layerwise_casting" in registry.hooks:
            casting.attach(registry.hooks["layerwise_casting"])

    def _note_norm(self, module: torch.nn.Module) -> None:
        if isinstance(module, _NormBase):
            self._norms.append(module)

    def _note_own(self, leader: torch.nn.Module) -> None:
        self._note_norm(leader)
        # Upstream lists a loose tensor once, under the first module that has it; a module that shares it needs it too.
        for table in (leader._parameters, leader._buffers):
            self._full.append((table, ids_of(table)))
            if table is leader._buffers:
                self._buffers.append(self._full[-1])
            self._own += [value for value in table.values() if value is not None]

    def _collect(self, modules: list[torch.nn.Module]) -> Iterator[Tensor]:
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()
        yield from self._loose
        yield from self._own

    def loose_now(self) -> list[Tensor]:
        """The loose tensors as they hang in their modules now; one that was deleted is left out."""
        found = []
        for tensor in self._loose:
            table, name = self._places.get(id(tensor), ({}, ""))
            value = table.get(name) if name else tensor
            if isinstance(value, Tensor):
                found.append(value)
        return found

    def intact(self) -> bool:
        """True while no parameter, buffer or submodule was added, removed or replaced."""
        # Asked before every forward of every group: plain loops, which cost half of what generators do.
        for table in self._empty:
            if table:
                return False
        for table, ids in self._full:
            if ids_of(table) != ids:
                return False
        return not self._places or all(id(table.get(name)) == key for key, (table, name) in self._places.items())

    def replaced_buffers(self) -> list[Tensor]:
        """Buffers that were put in the place of others since the structure was read."""
        found = []
        for table, ids in self._buffers:
            for value, before in zip(table.values(), ids):
                if id(value) != before and value is not None:
                    found.append(value)
        return found

    def volatile(self) -> set[int]:
        """Ids of the buffers that a forward may change without their version telling: batch norm statistics in training (the
        kernel does not count them), and inference tensors (which have no version)."""
        if not self._norms:
            return self._untold
        training = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        return self._untold.union(id(buffer) for norm in training for buffer in norm.buffers())


def ids_of(table: dict[str, Any]) -> tuple[int, ...]:
    """The identities of a table's values, in order."""
    return tuple(map(id, table.values()))


def _places(loose: list[Tensor], leader: torch.nn.Module) -> dict[int, tuple[dict[str, Any], str]]:
    wanted = {id(tensor) for tensor in loose}
    places: dict[int, tuple[dict[str, Any], str]] = {}
    for module in leader.modules() if wanted else ():
        for table in (module._parameters, module._buffers):
            places.update({id(value): (table, name) for name, value in table.items() if id(value) in wanted})
    return places


def unique(items: Any) -> list[Any]:
    """The items, each object once, in order."""
    return list({id(item): item for item in items}.values())


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
    return None if registry is None else registry.hooks.get("group_offloading")


def _hooked_below(leader: torch.nn.Module, but: GroupState) -> Iterator[GroupState]:
    for module in leader.modules():
        hook = group_hooks(module) if module is not leader else None
        state = None if hook is None else state_of(hook.group)
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
