"""A unit: the tensors that travel together in one slab.

A group usually is one unit. Where groups share a tensor (tied weights), the shared tensors are a unit of their own, which stays on
the device while any of these groups needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import backend, files
from .binding import (
    Binding,
    PlainBinding,
    RepackedBinding,
    StatefulBinding,
    WrapperBinding,
)
from .homes import Home, Keep, make_home
from .layout import byte_range, storage_bytes
from .packing import packed_for
from .swapping import let_go_of_base
from .tree import Tree, is_peculiar
from .watch import Holding, addresses, holding, unchanged, versions

#: Views are cached by slot; a unit meets two slots in steady state, a few more while the execution order changes.
CACHED_SLOTS = 4


class Entry:
    """One parameter or buffer, whichever groups it belongs to.

    The entry keeps the tensor alive: torch refuses to swap a tensor that is weakly referenced.

    Attributes:
        claims: the groups that need the tensor.
        unit: the unit that the tensor travels in, or None before it was planned.
        owner: the module that has the tensor, if its class may keep state there.
        from_host: True if the tensor was on the host when it was met: then `.to(device)` is what a resident model has.
    """

    __slots__ = ("__weakref__", "binding", "claims", "from_host", "owner", "tensor", "unit")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.claims: weakref.WeakSet[Any] = weakref.WeakSet()
        self.binding: Binding | None = None
        self.unit: Unit | None = None
        self.owner: torch.nn.Module | None = None
        self.from_host = tensor.device.type == "cpu"

    def bindable(self, device: torch.device, offload_device: torch.device) -> Binding:
        """The binding, made anew unless the tensor still holds what the present one gave it."""
        if self.binding is not None and self.binding.intact():
            return self.binding
        return make_binding(self.tensor, self.owner, device, offload_device)


class Unit:
    """Some tensors with one home and, while loaded, one slot.

    Attributes:
        folder: where the file of a unit that is kept in one is wanted.
        slot: the device memory that holds the bytes now, or None.
        buffer: device memory of its own, for a unit that does not go through an arena; it is empty while the unit is offloaded.
        bound: True while the tensors use the slot.
        lane: the lane that loaded the unit last.
        name: what a trace calls the unit.
        began: where a trace measures the present stay on the device from.
        volatile: ids of tensors that may change in forward without their version telling.
        users: how many groups need the unit on the device now.
    """

    def __init__(
        self, entries: list[Entry], device: torch.device, offload_device: torch.device, keep: Keep, folder: str | None = None
    ) -> None:
        self.entries = entries
        self.folder = folder
        self.device = device
        self.offload_device = offload_device
        self.keep = keep
        self.slot: Any = None
        self.buffer: Any = None
        self.lane: Any = None
        self.name = ""
        self.began: Any = None
        self.volatile: set[int] = set()
        self.bound = False
        self.users = 0
        self._home: Home | None = None
        self._bindings: list[Binding] = []
        self._views: dict[Any, tuple[list[list[Tensor]], tuple[Holding, list[int]], int]] = {}
        for entry in entries:
            entry.unit = self

    @property
    def home(self) -> Home:
        """The home that was made last; made now if there is none."""
        if self._home is None:
            self.make_home()
        assert self._home is not None
        return self._home

    @property
    def nbytes(self) -> int:
        """Bytes that the unit takes on the device."""
        return self.home.layout.device_nbytes

    def settle(self) -> None:
        """Makes the home, or makes it again if an offloaded tensor was given other data since (RC5)."""
        if not self.bound and not self.intact():
            self.make_home()

    def intact(self) -> bool:
        """True while every offloaded tensor holds what the home gave it."""
        if self._home is None or self._holding(self._host_leaves, self._host_inner) != self._held:
            return False
        return all(binding.attached() for binding in self._asked)

    def forget(self) -> None:
        """Lets go of the home, of the bindings and of device memory: the unit's tensors have other memory now."""
        for entry in self.entries:
            entry.binding = entry.unit = None
        self.entries, self._bindings, self._home, self.buffer, self.lane = [], [], None, None, None
        self._views.clear()
        for name in ("_outers", "_host_leaves", "_host_inner", "_held", "_counted", "_asked", "_leaf_lists"):
            self.__dict__.pop(name, None)

    def lends(self, leaf: Tensor) -> bool:
        """True if an offloaded tensor's leaf may lie in memory that belongs to the unit."""
        return self._home is None or self._home.holds(leaf)

    def stamp(self) -> list[int]:
        """The offloaded tensors' in-place change counters: bytes that were copied under other counters are stale."""
        return versions(self._counted)

    def make_home(self) -> None:
        """Makes the home anew from what the tensors hold now."""
        if self.keep is Keep.FILE:
            files.write([self])
        else:
            self.make_home_in_memory(self.keep)

    def make_home_in_memory(self, keep: Keep) -> None:
        """Makes the home anew in memory, whatever is meant for the unit."""
        # The new home is complete before any tensor changes, so that a failure leaves every weight where it was.
        bindings, leaves, packs = self.cargo()
        self.adopt(bindings, make_home(leaves, self.device, self.offload_device, keep, packs))
        del leaves
        if keep is not Keep.AS_IS:
            backend.let_go(self.home.layout.nbytes)

    def cargo(self) -> tuple[list[Binding], list[Tensor], list[bool]]:
        """The bindings for a new home, the leaves that travel, and for each whether it is packed on arrival."""
        bindings = [entry.bindable(self.device, self.offload_device) for entry in self.entries]
        leaves = [leaf for binding in bindings for leaf in binding.cargo]
        packs = [entry.from_host for entry, binding in zip(self.entries, bindings) for _ in binding.cargo]
        return bindings, leaves, packs

    def adopt(self, bindings: list[Binding], home: Home) -> None:
        """Makes a home that was made from the cargo of these bindings the unit's own."""
        for entry, binding, parts in zip(self.entries, bindings, split(home.leaves, bindings)):
            binding.adopt(parts)
            entry.binding = binding
        self._bindings, self._home = bindings, home
        self._views.clear()
        self._look()

    def _look(self) -> None:
        """Notes what the offloaded tensors hold."""
        self._outers = [outer for binding in self._bindings for outer in binding.outers]
        self._host_leaves, self._host_inner = self._sorted(binding.host_leaves for binding in self._bindings)
        self._held = self._holding(*self._sorted(binding.kept for binding in self._bindings))
        self._counted = [*self._outers, *self._host_inner, *self._host_leaves]
        self._asked = [binding for binding in self._bindings if type(binding) is not PlainBinding]
        self._leaf_lists = [binding.host_leaves for binding in self._asked]

    def _sorted(self, lists: Iterable[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves that are tensors by themselves, and those inside wrappers."""
        plain: list[Tensor] = []
        inner: list[Tensor] = []
        for binding, leaves in zip(self._bindings, lists):
            (inner if binding.outers else plain).extend(leaves)
        return plain, inner

    @staticmethod
    def _holding(plain: list[Tensor], inner: list[Tensor]) -> tuple[Holding, list[int]]:
        return holding(plain), addresses(inner)

    def bind(self, in_place: bool) -> None:
        """Makes the tensors use the bytes in the slot; `in_place` as for a binding."""
        self._bound_views, self._bound_held = self._views_in(self.slot)
        for binding, views in zip(self._bindings, self._bound_views):
            binding.bind(views, in_place)
        self._device_leaves, self._device_inner = self._sorted(binding.device_leaves for binding in self._bindings)
        self._stamp = self._device_stamp()
        self.bound = True

    def ranges(self) -> tuple[list[int], list[list[Tensor]]]:
        """Where each leaf starts in device memory (bytes, ascending), and the tensors whose counters tell of its changes."""
        layout, bindings = self.home.layout, [binding for binding in self._bindings for _ in binding.cargo]
        found = []
        for place, binding in zip(layout.places, bindings):
            start = layout.regions[place.region].offset + place.offset if place.dense is None else place.dense[0]
            found.append((start, [*binding.outers, *binding.host_leaves]))
        found.sort(key=lambda pair: pair[0])
        return [start for start, _ in found], [tensors for _, tensors in found]

    def _views_in(self, slot: Any) -> tuple[list[list[Tensor]], tuple[Holding, list[int]]]:
        # The same slot may lie at another address in another forward: its views are good, what they hold is not.
        where = slot.memory.data_ptr()
        known = self._views.get(slot.key)
        if known is not None and known[2] == where:
            return known[0], known[1]
        views = known[0] if known is not None else split(self.home.layout.device_views(slot.memory), self._bindings)
        held = self._holding(*self._sorted(views))
        if slot.key is not None:
            if len(self._views) >= CACHED_SLOTS:
                self._views.clear()
            self._views[slot.key] = views, held, where
        return views, held

    def unbind(self) -> bool:
        """Hands the host leaves back; what forward changed is copied to the host first, and nothing else. True if anything was."""
        held = self._holding(self._device_leaves, self._device_inner)
        changed = bool(self.volatile) or self._stamp != self._device_stamp() or held != self._bound_held
        if changed:
            self._write_back()
        for binding in self._bindings:
            binding.unbind()
            if self.slot.key is None:
                binding.forget()
        self._bound_views = []
        self.bound = False
        if any(binding.host_leaves is not leaves for binding, leaves in zip(self._asked, self._leaf_lists)):
            self._look()
        return changed

    def _device_stamp(self) -> list[int]:
        return versions([*self._outers, *self._device_inner, *self._device_leaves])

    def _write_back(self) -> None:
        counts = dict(zip(map(id, [*self._outers, *self._device_inner, *self._device_leaves]), self._stamp))
        for entry, binding, views in zip(self.entries, self._bindings, self._bound_views):
            tensors = [*binding.outers, *binding.device_leaves]
            changed = versions(tensors) != [counts[id(t)] for t in tensors] or id(entry.tensor) in self.volatile
            for place, (leaf, view) in enumerate(zip(binding.device_leaves, views)):
                if not unchanged(leaf, view):
                    # Forward gave it other data: that data is the value now, and the slab no longer fits it.
                    binding.cargo[place] = self._brought_back(leaf, views, binding.cargo)
                    self._home = None
                elif changed:
                    copy_bytes(leaf, binding.cargo[place])
            if changed:
                binding.changed_on_device()
                if self._home is not None:
                    self._home.written()

    def _brought_back(self, leaf: Tensor, views: list[Tensor], cargo: list[Tensor]) -> Tensor:
        for view, host in zip(views, cargo):
            if unchanged(leaf, view):
                return host
        return leaf.data.to(self.offload_device)


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copies a leaf onto a leaf of the same shape; with the same strides also where elements share memory (stride 0)."""
    if source.stride() != target.stride():
        target.copy_(source)
        return
    begin, end = byte_range(source)
    start = byte_range(target)[0]
    storage_bytes(target)[start : start + end - begin].copy_(storage_bytes(source)[begin:end])


def split(leaves: list[Tensor], bindings: list[Binding]) -> list[list[Tensor]]:
    """Deals `leaves` out to the bindings, as many as each one's cargo has."""
    parts, start = [], 0
    for binding in bindings:
        parts.append(leaves[start : start + len(binding.cargo)])
        start += len(binding.cargo)
    return parts


def make_binding(tensor: Tensor, owner: torch.nn.Module | None, device: torch.device, offload_device: torch.device) -> Binding:
    """The binding for one tensor that is on either device now."""
    tree = Tree(tensor, owner)
    for leaf in tree.leaves:
        let_go_of_base(leaf)
    if is_peculiar(tensor):
        return StatefulBinding(tree, device, offload_device)
    if not tree.wrappers:
        return PlainBinding(tree)
    if tree.leaves and tree.leaves[0].device == device:
        host = packed_for(tensor, tree, offload_device)
        if host is not None:
            return RepackedBinding.from_device(tensor, host, device, offload_device)
        return WrapperBinding(tree, device, offload_device)
    packed = packed_for(tensor, tree, device)
    if packed is not None:
        return RepackedBinding.from_host(tensor, packed, device, offload_device)
    return WrapperBinding(tree, device, offload_device)
