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

from .binding import (
    Binding,
    PlainBinding,
    RepackedBinding,
    StatefulBinding,
    WrapperBinding,
    let_go_of_base,
    unchanged,
)
from .homes import Home, make_home
from .layout import byte_range, storage_bytes
from .packing import packed_for
from .tree import Tree, is_peculiar

#: Views are cached by slot; a unit meets two slots in steady state, a few more while the execution order changes.
CACHED_SLOTS = 4


class Entry:
    """One parameter or buffer, whichever groups it belongs to.

    The entry keeps the tensor alive: torch refuses to swap a tensor that is weakly referenced.

    Attributes:
        claims: the groups that need the tensor.
        unit: the unit that the tensor travels in, or None before it was planned.
        owner: the module that has the tensor, if its class may keep state there.
    """

    __slots__ = ("__weakref__", "binding", "claims", "owner", "tensor", "unit")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.claims: weakref.WeakSet[Any] = weakref.WeakSet()
        self.binding: Binding | None = None
        self.unit: Unit | None = None
        self.owner: torch.nn.Module | None = None

    def bindable(self, device: torch.device, offload_device: torch.device) -> Binding:
        """The binding, made anew unless the tensor still holds what the present one gave it."""
        if self.binding is not None and self.binding.intact():
            return self.binding
        return make_binding(self.tensor, self.owner, device, offload_device)


class Unit:
    """Some tensors with one home and, while loaded, one slot.

    Attributes:
        slot: the device memory that holds the bytes now, or None.
        buffer: device memory of its own, for a unit that does not go through an arena; it is empty while the unit is offloaded.
        bound: True while the tensors use the slot.
        lane: the lane that loaded the unit last.
        volatile: ids of tensors that may change in forward without their version telling.
        users: how many groups need the unit on the device now.
    """

    def __init__(self, entries: list[Entry], device: torch.device, offload_device: torch.device, pin: bool) -> None:
        self.entries = entries
        self.device = device
        self.offload_device = offload_device
        self.pin = pin
        self.slot: Any = None
        self.buffer: Any = None
        self.lane: Any = None
        self.volatile: set[int] = set()
        self.bound = False
        self.users = 0
        self._home: Home | None = None
        self._views: dict[Any, list[list[Tensor]]] = {}
        self._bound_views: list[list[Tensor]] = []
        self._stamps: list[list[int]] = []
        for entry in entries:
            entry.unit = self

    @property
    def home(self) -> Home:
        """The home that was made last; made now if there is none."""
        if self._home is None:
            self._make_home()
        assert self._home is not None
        return self._home

    @property
    def nbytes(self) -> int:
        """Bytes that the unit takes on the device."""
        return self.home.layout.nbytes

    def settle(self) -> None:
        """Makes the home, or makes it again if an offloaded tensor was given other data since (RC5)."""
        if self.bound or (self._home is not None and self.intact()):
            return
        self._make_home()

    def intact(self) -> bool:
        """True while every offloaded tensor holds what the home gave it."""
        for entry in self.entries:
            if entry.binding is None or not entry.binding.intact():
                return False
        return True

    def stamps(self) -> list[list[int]]:
        """In-place change counters of the tensors as they are now: bytes that were copied under other counters are stale."""
        return [binding.stamp() for binding in self._bindings()]

    def _bindings(self) -> Iterable[Binding]:
        return (entry.binding for entry in self.entries if entry.binding is not None)

    def _make_home(self) -> None:
        # The new home is complete before any tensor changes, so that a failure leaves every weight where it was.
        bindings = [entry.bindable(self.device, self.offload_device) for entry in self.entries]
        leaves = [leaf for binding in bindings for leaf in binding.cargo]
        home = make_home(leaves, self.device, self.offload_device, self.pin)
        for entry, binding, parts in zip(self.entries, bindings, split(home.leaves, bindings)):
            binding.adopt(parts)
            entry.binding = binding
        self._home = home
        self._views.clear()

    def bind(self, in_place: bool) -> None:
        """Makes the tensors use the bytes in the slot; `in_place` as for a binding."""
        self._bound_views = self._views_in(self.slot)
        for binding, views in zip(self._bindings(), self._bound_views):
            binding.bind(views, in_place)
        self._stamps = self.stamps()
        self.bound = True

    def _views_in(self, slot: Any) -> list[list[Tensor]]:
        views = self._views.get(slot.key)
        if views is None:
            layout = self.home.layout
            views = split(layout.views(layout.slices(slot.memory)), list(self._bindings()))
            if slot.key is not None:
                if len(self._views) >= CACHED_SLOTS:
                    self._views.clear()
                self._views[slot.key] = views
        return views

    def unbind(self) -> None:
        """Hands the host leaves back; what forward changed is copied to the host first, and nothing else."""
        self._write_back()
        for binding in self._bindings():
            binding.unbind()
        self._bound_views = []
        self.bound = False

    def _write_back(self) -> None:
        for entry, views, stamp in zip(self.entries, self._bound_views, self._stamps):
            binding = entry.binding
            assert binding is not None
            changed = binding.stamp() != stamp or id(entry.tensor) in self.volatile
            for place, (leaf, view) in enumerate(zip(binding.device_leaves(), views)):
                if not unchanged(leaf, view):
                    # Forward gave it other data: that data is the value now, and the slab no longer fits it.
                    binding.cargo[place] = self._brought_back(leaf, views, binding.cargo)
                    self._home = None
                elif changed:
                    copy_bytes(leaf, binding.cargo[place])
            if changed:
                binding.changed_on_device()


    def _brought_back(self, leaf: Tensor, views: list[Tensor], cargo: list[Tensor]) -> Tensor:
        for view, host in zip(views, cargo):
            if unchanged(leaf, view):
                return host
        return leaf.data.to(self.offload_device)


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copies a leaf onto a leaf of the same layout; also where several elements share one place in memory (stride 0)."""
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


def make_binding(
    tensor: Tensor, owner: torch.nn.Module | None, device: torch.device, offload_device: torch.device
) -> Binding:
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

