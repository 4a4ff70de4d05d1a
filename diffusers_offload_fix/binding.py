"""Bindings: how a tensor changes between its host leaves and its device leaves while staying the same Python object.

A plain tensor takes other data. A wrapper is swapped with a prebuilt twin that reports the other device (`torch.utils.swap_tensors`);
where torch refuses that, because of a weak reference (torch.compile holds one on every parameter) or a graph that saved the tensor,
its leaves and its outer metadata change in place, with the same result. A wrapper that its class repacks for the device exchanges
class and attributes with the repacked one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .packing import moved_by_class
from .tree import Tree, attributes, bare, set_attribute, twin

#: Tests set this to "in_place" to run the whole contract that way; None takes the first way that torch accepts.
forced_way: str | None = None


class Binding:
    """Moves one tensor between host and device leaves; `bind` and `unbind` alternate.

    Attributes:
        tensor: the parameter or buffer; its identity never changes.
        cargo: the dense tensors whose bytes travel, as they lie on the host.
    """

    tensor: Tensor
    cargo: list[Tensor]

    def adopt(self, leaves: list[Tensor]) -> None:
        """Takes `leaves` as the host tensors of the cargo; the tensor is offloaded afterwards."""
        raise NotImplementedError

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        """Makes the tensor use `views`, the cargo on the device; with `in_place`, its inner tensors keep their identity."""
        raise NotImplementedError

    def unbind(self) -> None:
        """Makes the tensor use its host leaves again."""
        raise NotImplementedError

    def intact(self) -> bool:
        """True while the offloaded tensor still holds what `adopt` or `unbind` gave it."""
        raise NotImplementedError

    def device_leaves(self) -> list[Tensor]:
        """The leaves that hold the cargo while the tensor is bound."""
        raise NotImplementedError

    def stamp(self) -> list[int]:
        """In-place change counters as they are now. A wrapper's own operations count on its outside only, its leaves' on theirs."""
        raise NotImplementedError

    def changed_on_device(self) -> None:
        """Told before `unbind` when forward changed the bytes and they have been copied to the cargo."""


def version(leaf: Tensor) -> int:
    """How often a leaf was changed in place; an inference tensor does not tell and counts as unchanged."""
    return 0 if leaf.is_inference() else leaf._version


def unchanged(leaf: Tensor, host: Tensor) -> bool:
    """True if `leaf` still is `host`: same memory, dtype, shape and strides."""
    return (
        leaf.data_ptr() == host.data_ptr()
        and leaf.dtype is host.dtype
        and leaf.shape == host.shape
        and leaf.stride() == host.stride()
        and leaf.device == host.device
    )


class PlainBinding(Binding):
    """A tensor over plain storage, by `.data`."""

    def __init__(self, tree: Tree) -> None:
        self.tensor = tree.root
        self._leaves = tree.leaves
        self.cargo = list(tree.leaves)

    def adopt(self, leaves: list[Tensor]) -> None:
        self.cargo = leaves
        self.unbind()

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        for leaf, view in zip(self._leaves, views):
            leaf.data = view

    def unbind(self) -> None:
        for leaf, host in zip(self._leaves, self.cargo):
            leaf.data = host

    def intact(self) -> bool:
        return all(unchanged(leaf, host) for leaf, host in zip(self._leaves, self.cargo))

    def device_leaves(self) -> list[Tensor]:
        return self._leaves

    def stamp(self) -> list[int]:
        return [version(leaf) for leaf in self._leaves]


class StatefulBinding(PlainBinding):
    """A tensor over plain storage with more tensors in its attributes or in its module's (bitsandbytes' states).

    Its library moves these between objects and makes new ones while it runs, so they are looked for each time.
    """

    def __init__(self, tree: Tree, device: torch.device, offload_device: torch.device) -> None:
        super().__init__(tree)
        self._tree = tree
        self._device = device
        self._offload_device = offload_device

    def unbind(self) -> None:
        super().unbind()
        known = set(map(id, self._leaves))
        for leaf in self._tree.fresh().leaves:
            if id(leaf) not in known and leaf.device == self._device:
                let_go_of_base(leaf)
                leaf.data = leaf.data.to(self._offload_device)

    def intact(self) -> bool:
        now = self._tree.fresh().leaves
        return list(map(id, now)) == list(map(id, self._leaves)) and super().intact()


class WrapperBinding(Binding):
    """A wrapper whose leaves are the same on both devices."""

    def __init__(self, tree: Tree, device: torch.device, offload_device: torch.device) -> None:
        self.tensor = tree.root
        self.cargo = list(tree.leaves)
        self._host = tree
        self._bound = tree
        self._twin: Tree | None = None
        self._device = device
        self._offload_device = offload_device
        self._outers: dict[torch.device, list[Tensor]] = {}

    def adopt(self, leaves: list[Tensor]) -> None:
        self.cargo = leaves
        self._bound = self._host
        self._set_leaves(self._host, leaves)
        self._set_outers(self._host, self._offload_device)

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        if self._may_swap(in_place) and self._swap_in(views):
            return
        self._bound = self._host
        self._set_leaves(self._host, views)
        self._set_outers(self._host, self._device)

    def unbind(self) -> None:
        if self._bound is self._twin:
            if self._swap_out():
                return
            # A weak reference or a graph appeared while the tensor was on the device: it keeps the twin's inner tensors for good.
            self._host, self._twin = Tree(self.tensor), None
        self._bound = self._host
        self._set_leaves(self._host, self.cargo)
        self._set_outers(self._host, self._offload_device)

    def intact(self) -> bool:
        return self._host.intact() and all(unchanged(leaf, host) for leaf, host in zip(self._host.leaves, self.cargo))

    def device_leaves(self) -> list[Tensor]:
        return self._bound.leaves

    def stamp(self) -> list[int]:
        return [version(self.tensor), *(version(leaf) for leaf in self._bound.leaves)]

    def _may_swap(self, in_place: bool) -> bool:
        # A graph that saves the tensor would make torch poison its gradient; a weak reference makes torch refuse.
        return forced_way != "in_place" and not in_place and not weakref.getweakrefs(self.tensor)

    def _swap_in(self, views: list[Tensor]) -> bool:
        if self._twin is None:
            self._twin = Tree(twin(self.tensor, self._device))
        carry_attributes(self.tensor, self._twin.root)
        if self._twin.root.requires_grad != self.tensor.requires_grad:
            self._twin.root.requires_grad_(self.tensor.requires_grad)
        self._set_leaves(self._twin, views)
        if not swap(self.tensor, self._twin.root):
            return False
        self._bound = self._twin
        return True

    def _swap_out(self) -> bool:
        assert self._twin is not None
        if not swap(self.tensor, self._twin.root):
            return False
        carry_attributes(self._twin.root, self.tensor)
        self._bound = self._host
        return True

    @staticmethod
    def _set_leaves(tree: Tree, values: list[Tensor]) -> None:
        for leaf, value in zip(tree.leaves, values):
            leaf.data = value

    def _set_outers(self, tree: Tree, device: torch.device) -> None:
        outers = self._outers.get(device)
        if outers is None:
            outers = self._outers[device] = [bare(wrapper, device) for wrapper in tree.wrappers]
        for wrapper, outer in zip(tree.wrappers, outers):
            wrapper.data = outer


class RepackedBinding(Binding):
    """A wrapper that its class packs differently for each device.

    The tensor keeps its host form in host memory; what travels is the device form, packed once by the class's own `.to()`.
    """

    def __init__(self, host: Tensor, packed: Tensor, device: torch.device, offload_device: torch.device) -> None:
        self.tensor = host
        self._other = packed
        self._host = Tree(host)
        self._packed = Tree(packed)
        self._device = device
        self._offload_device = offload_device
        self.cargo = list(self._packed.leaves)
        self._kept = [leaf.data for leaf in self._host.leaves]
        self._is_bound = False
        self._stamp = self.stamp()

    @classmethod
    def from_host(cls, tensor: Tensor, packed: Tensor, device: torch.device, offload_device: torch.device) -> Binding:
        """For a tensor that is on the host: `packed` is its form on the device."""
        as_parameter(packed, tensor)
        return cls(tensor, packed, device, offload_device)

    @classmethod
    def from_device(cls, tensor: Tensor, host: Tensor, device: torch.device, offload_device: torch.device) -> Binding:
        """For a tensor that is on the device already: it becomes `host`, and its own leaves are the cargo."""
        as_parameter(host, tensor)
        exchange(tensor, host, offload_device)
        return cls(tensor, host, device, offload_device)

    def adopt(self, leaves: list[Tensor]) -> None:
        self.cargo = leaves
        # The packed form waits over the parked bytes, so that it holds no device memory.
        self._park()

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        for leaf, view in zip(self._packed.leaves, views):
            leaf.data = view
        exchange(self.tensor, self._other, self._device, in_place)
        self._is_bound = True

    def unbind(self) -> None:
        exchange(self.tensor, self._other, self._offload_device)
        self._park()
        self._is_bound = False
        self._stamp = self.stamp()

    def intact(self) -> bool:
        return (
            self._host.intact()
            and self.stamp() == self._stamp
            and all(unchanged(leaf, kept) for leaf, kept in zip(self._host.leaves, self._kept))
        )

    def device_leaves(self) -> list[Tensor]:
        return self._packed.leaves

    def stamp(self) -> list[int]:
        leaves = self._packed.leaves if self._is_bound else self._host.leaves
        return [version(self.tensor), *map(version, leaves)]

    def changed_on_device(self) -> None:
        # Rare enough to go through the class: the host form follows the packed one.
        host = moved_by_class(self.tensor, self._offload_device)
        if host is not None:
            for kept, leaf in zip(self._kept, Tree(host).leaves):
                kept.copy_(leaf)

    def _park(self) -> None:
        for leaf, host in zip(self._packed.leaves, self.cargo):
            leaf.data = host


def swap(tensor: Tensor, other: Tensor) -> bool:
    """Swaps two tensors' contents, or says False where torch refuses; nothing has changed then."""
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def let_go_of_base(leaf: Tensor) -> None:
    """Makes a leaf that was made as a view stand alone: else it keeps its base's memory for life, whatever data it is given."""
    if leaf._is_view():
        swap(leaf, leaf.data)


def exchange(tensor: Tensor, other: Tensor, device: torch.device, in_place: bool = False) -> None:
    """Swaps two wrappers of different packing; `tensor` reports `device` afterwards."""
    if forced_way != "in_place" and not in_place and swap(tensor, other):
        carry_attributes(other, tensor)
        return
    mine, others = attributes(tensor), attributes(other)
    outer, other_outer = bare(other, device), bare(tensor, tensor.device)
    tensor.__class__, other.__class__ = type(other), type(tensor)
    _replace_attributes(tensor, others)
    _replace_attributes(other, mine)
    carry_attributes(other, tensor)
    tensor.data, other.data = outer, other_outer


def _replace_attributes(tensor: Tensor, values: dict[str, Any]) -> None:
    for name in attributes(tensor):
        if name not in values and name in tensor.__dict__:
            del tensor.__dict__[name]
    for name, value in values.items():
        set_attribute(tensor, name, value)


def carry_attributes(source: Tensor, target: Tensor) -> None:
    """Gives `target` the Python attributes that were set on `source` while it stood in for it; inner tensors stay."""
    old, new = source.__dict__, target.__dict__
    if old.keys() == new.keys() and all(old[name] is new[name] for name in new if not isinstance(new[name], Tensor)):
        return
    for name, value in old.items():
        if not isinstance(value, Tensor) and not isinstance(new.get(name), Tensor):
            new[name] = value


def as_parameter(tensor: Tensor, like: Tensor) -> None:
    """Makes `tensor` a parameter if `like` is one, with the Python attributes of `like` that it lacks."""
    for name, value in getattr(like, "__dict__", {}).items():
        if name not in tensor.__dict__ and not isinstance(value, Tensor):
            tensor.__dict__[name] = value
    if like.requires_grad != tensor.requires_grad and (tensor.is_floating_point() or not like.requires_grad):
        tensor.requires_grad_(like.requires_grad)
