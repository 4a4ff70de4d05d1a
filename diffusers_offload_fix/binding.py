"""Bindings: how a tensor changes between its host leaves and its device leaves while staying the same Python object.

A plain tensor takes other data. A wrapper is swapped with a prebuilt twin that reports the other device (`torch.utils.swap_tensors`);
where torch refuses that, because of a weak reference (torch.compile holds one on every parameter) or a graph that saved the tensor,
its leaves and its outer metadata change in place, with the same result. A wrapper that its class repacks for the device exchanges
class and attributes with the repacked one.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .packing import moved_by_class
from .swapping import as_parameter, carry_attributes, exchange, inference_alias, let_go_of_base, set_leaves, swap
from .tree import Tree, bare, twin
from .watch import attribute_ids, holding, is_counted, versions

#: Tests set this to "in_place" to run the whole contract that way; None takes the first way that torch accepts.
forced_way: str | None = None


class Binding:
    """Moves one tensor between host and device leaves; `bind` and `unbind` alternate.

    Attributes:
        tensor: the parameter or buffer; its identity never changes.
        cargo: the dense tensors whose bytes travel, as they lie on the host.
        host_leaves: the leaves that the tensor has while it is offloaded.
        kept: what `host_leaves` hold then.
        device_leaves: the leaves that hold the cargo while the tensor is bound.
        outers: wrappers whose own operations count changes on the outside only, not on their leaves.
        noted: False if its library may keep the tensor where autograd's hooks do not see it.
    """

    tensor: Tensor
    cargo: list[Tensor]
    host_leaves: list[Tensor]
    device_leaves: list[Tensor]
    outers: tuple[Tensor, ...] = ()
    noted: bool = True

    @property
    def kept(self) -> list[Tensor]:
        return self.cargo

    @property
    def form(self) -> Tensor:
        """The tensor whose leaves the cargo is."""
        return self.tensor

    @property
    def rest(self) -> list[Tensor]:
        """Host leaves that do not travel."""
        return []

    def adopt(self, leaves: list[Tensor]) -> None:
        """Takes `leaves` as the host tensors of the cargo; the tensor is offloaded afterwards."""
        raise NotImplementedError

    def adopt_rest(self, leaves: list[Tensor]) -> None:
        """Takes `leaves`, which hold the same, in the place of `rest`."""

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        """Makes the tensor use `views`, the cargo on the device; with `in_place`, its inner tensors keep their identity."""
        raise NotImplementedError

    def unbind(self) -> None:
        """Makes the tensor use its host leaves again."""
        raise NotImplementedError

    def forget(self) -> None:
        """Lets go of the views that it was bound to: their memory will not be met again."""

    def attached(self) -> bool:
        """True while the offloaded tensor has the leaves that it had; whether these hold the same is asked of them."""
        return True

    def intact(self) -> bool:
        """True while the offloaded tensor holds what `adopt` or `unbind` gave it."""
        return self.attached() and holding(self.host_leaves) == holding(self.kept)

    def changed_on_device(self) -> None:
        """Told before `unbind` when forward changed the bytes and they have been copied to the cargo."""


class PlainBinding(Binding):
    """A tensor over plain storage, by `.data`."""

    def __init__(self, tree: Tree) -> None:
        self.tensor = tree.root
        self.host_leaves = self.device_leaves = tree.leaves
        self.cargo = list(tree.leaves)
        self._counted = all(map(is_counted, tree.leaves))

    def adopt(self, leaves: list[Tensor]) -> None:
        self.cargo = leaves if self._counted else list(map(inference_alias, leaves))
        self.unbind()

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        set_leaves(self.host_leaves, views if self._counted else list(map(inference_alias, views)))

    def unbind(self) -> None:
        set_leaves(self.host_leaves, self.cargo)


class StatefulBinding(PlainBinding):
    """A tensor over plain storage with more tensors in its attributes or in its module's (bitsandbytes' states).

    Its library moves these between objects and makes new ones while it runs, so they are looked for each time.
    """

    def __init__(self, tree: Tree, device: torch.device, offload_device: torch.device) -> None:
        super().__init__(tree)
        self._tree = tree
        self.noted = len(tree.leaves) == 1
        self._device = device
        self._offload_device = offload_device

    def unbind(self) -> None:
        super().unbind()
        known = set(map(id, self.host_leaves))
        for leaf in self._tree.fresh().leaves:
            if id(leaf) not in known and leaf.device == self._device:
                let_go_of_base(leaf)
                leaf.data = leaf.data.to(self._offload_device)

    def attached(self) -> bool:
        now = self._tree.fresh().leaves
        return list(map(id, now)) == list(map(id, self.host_leaves))


class WrapperBinding(Binding):
    """A wrapper whose leaves are the same on both devices."""

    def __init__(self, tree: Tree, device: torch.device, offload_device: torch.device) -> None:
        self.tensor = tree.root
        self.outers = (tree.root,)
        self.cargo = list(tree.leaves)
        self._twin: Tree | None = None
        self._twin_views: list[Tensor] | None = None
        self._device = device
        self._offload_device = offload_device
        self._outer_forms: dict[torch.device, list[Tensor]] = {}
        self._set_host(tree)

    def _set_host(self, tree: Tree) -> None:
        self._host = tree
        self.host_leaves = self.device_leaves = tree.leaves
        self._attributes = attribute_ids(tree.wrappers)
        self._touched = False

    def adopt(self, leaves: list[Tensor]) -> None:
        self.cargo = leaves
        self._move_in_place(leaves, self._offload_device)

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        # A graph that saves the tensor would make torch poison its gradient; a weak reference makes torch refuse.
        if in_place or forced_way == "in_place" or weakref.getweakrefs(self.tensor) or not self._swap_in(views):
            self._move_in_place(views, self._device)

    def unbind(self) -> None:
        if self.device_leaves is self.host_leaves:
            self._move_in_place(self.cargo, self._offload_device)
        elif not self._swap_out():
            # A weak reference or a graph appeared while the tensor was on the device: it keeps the twin's inner tensors for good.
            self._set_host(Tree(self.tensor))
            self._twin = self._twin_views = None
            self._move_in_place(self.cargo, self._offload_device)

    def forget(self) -> None:
        if self._twin is not None:
            set_leaves(self._twin.leaves, [leaf.new_empty(0) for leaf in self._twin.leaves])
        self._twin_views = None

    def attached(self) -> bool:
        # An attribute that was set is no inner tensor that was replaced, but it changes the same list: look closer then.
        if attribute_ids(self._host.wrappers) == self._attributes:
            return True
        self._attributes = attribute_ids(self._host.wrappers)
        self._touched = True
        return self._host.intact()

    def _swap_in(self, views: list[Tensor]) -> bool:
        if self._twin is None:
            self._twin = Tree(twin(self.tensor, self._device))
            self._twin_attributes = attribute_ids((self._twin.root,))
        if self._twin_views is not views:
            set_leaves(self._twin.leaves, views)
            self._twin_views = views
        stand_in = self._twin.root
        if self._touched:
            carry_attributes(self.tensor, stand_in)
            self._touched = False
            self._twin_attributes = attribute_ids((stand_in,))
        if stand_in.requires_grad != self.tensor.requires_grad:
            stand_in.requires_grad_(self.tensor.requires_grad)
        if not swap(self.tensor, stand_in):
            return False
        self.device_leaves = self._twin.leaves
        return True

    def _swap_out(self) -> bool:
        assert self._twin is not None
        touched = attribute_ids((self.tensor,)) != self._twin_attributes
        if not swap(self.tensor, self._twin.root):
            return False
        if touched:
            carry_attributes(self._twin.root, self.tensor)
            self._attributes = attribute_ids(self._host.wrappers)
            self._twin_attributes = attribute_ids((self._twin.root,))
            self._twin_views = None
        self.device_leaves = self.host_leaves
        return True

    def _move_in_place(self, leaves: list[Tensor], device: torch.device) -> None:
        self.device_leaves = self.host_leaves
        set_leaves(self.host_leaves, leaves)
        outers = self._outer_forms.get(device)
        if outers is None:
            outers = self._outer_forms[device] = [bare(wrapper, device) for wrapper in self._host.wrappers]
        set_leaves(self._host.wrappers, outers)


class RepackedBinding(Binding):
    """A wrapper that its class packs differently for each device.

    The tensor keeps its host form in host memory; what travels is the device form, packed once by the class's own `.to()`.
    """

    def __init__(self, host: Tensor, packed: Tensor, device: torch.device, offload_device: torch.device) -> None:
        self.tensor = host
        self.outers = (host,)
        self._other = packed
        self._host = Tree(host)
        self.host_leaves = self._host.leaves
        self.device_leaves = Tree(packed).leaves
        self._device = device
        self._offload_device = offload_device
        self.cargo = list(self.device_leaves)
        self._kept = [leaf.data for leaf in self.host_leaves]
        self._in_place = False
        self._versions = self._count()

    @property
    def kept(self) -> list[Tensor]:
        return self._kept

    @property
    def form(self) -> Tensor:
        return self._other

    @property
    def rest(self) -> list[Tensor]:
        return self.host_leaves

    def adopt_rest(self, leaves: list[Tensor]) -> None:
        set_leaves(self.host_leaves, leaves)
        self._kept = leaves
        self._versions = self._count()

    @classmethod
    def from_host(cls, tensor: Tensor, packed: Tensor, device: torch.device, offload_device: torch.device) -> Binding:
        """For a tensor that is on the host: `packed` is its form on the device."""
        as_parameter(packed, tensor)
        return cls(tensor, packed, device, offload_device)

    @classmethod
    def from_device(cls, tensor: Tensor, host: Tensor, device: torch.device, offload_device: torch.device) -> Binding:
        """For a tensor that is on the device already: it becomes `host`, and its own leaves are the cargo."""
        as_parameter(host, tensor)
        exchange(tensor, host, offload_device, forced_way == "in_place")
        return cls(tensor, host, device, offload_device)

    def adopt(self, leaves: list[Tensor]) -> None:
        self.cargo = leaves
        # The packed form waits over the parked bytes, so that it holds no device memory.
        set_leaves(self.device_leaves, leaves)

    def bind(self, views: list[Tensor], in_place: bool) -> None:
        set_leaves(self.device_leaves, views)
        self._in_place = in_place or forced_way == "in_place"
        exchange(self.tensor, self._other, self._device, self._in_place)

    def unbind(self) -> None:
        # Swapping a tensor that a graph has saved poisons its gradient.
        exchange(self.tensor, self._other, self._offload_device, self._in_place)
        set_leaves(self.device_leaves, self.cargo)
        self._versions = self._count()

    def attached(self) -> bool:
        # The packed bytes are worth what the host form was when they were packed.
        return self._host.intact() and self._count() == self._versions

    def changed_on_device(self) -> None:
        # Rare enough to go through the class: the host form follows the packed one.
        host = moved_by_class(self.tensor, self._offload_device)
        if host is not None:
            for kept, leaf in zip(self._kept, Tree(host).leaves):
                kept.copy_(leaf)

    def _count(self) -> list[int]:
        return versions([self.tensor, *self.host_leaves])
