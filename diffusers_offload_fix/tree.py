"""A tensor as a tree of leaves.

A plain tensor is its own single leaf. A traceable wrapper subclass (torchao, quanto, DTensor, anybody's) keeps its bytes in inner
tensors, which may be wrappers again; a parameter subclass over plain storage (bitsandbytes) may carry more tensors in its attributes.
Everything that moves a tensor needs only the leaves, and no library has to be named.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: How deep attribute objects (such as a quantisation state with a nested state) are searched for tensors.
ATTRIBUTE_DEPTH = 3


#: Where a module keeps what it registers; the rest of its attributes is its own.
MODULE_TABLES = frozenset(torch.nn.Module().__dict__)


class Tree:
    """The leaves and wrappers of one tensor, as they are at the moment of reading.

    Attributes:
        root: the tensor that was read.
        wrappers: every wrapper tensor in it, outermost first; empty for plain storage.
        leaves: every dense tensor in it, in a stable order.
        links: for each inner tensor, `(owner, name, tensor)`: where it hangs.
        owner: the module that keeps more of the tensor's state in its own attributes, or None.
    """

    __slots__ = ("leaves", "links", "owner", "root", "wrappers")

    def __init__(self, root: Tensor, owner: torch.nn.Module | None = None) -> None:
        self.root = root
        self.owner = owner
        self.wrappers: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.links: list[tuple[Any, str, Tensor]] = []
        self._walk(root)
        if owner is not None:
            self._walk_attributes(owner, ATTRIBUTE_DEPTH)

    def _walk(self, tensor: Tensor) -> None:
        if is_wrapper(tensor):
            self.wrappers.append(tensor)
            for name, child in children(tensor):
                self.links.append((tensor, name, child))
                self._walk(child)
            return
        self.leaves.append(tensor)
        if is_peculiar(tensor):
            self._walk_attributes(tensor, ATTRIBUTE_DEPTH)

    def _walk_attributes(self, owner: Any, depth: int) -> None:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(owner, torch.nn.Module) and name in MODULE_TABLES:
                continue
            if is_attached(value):
                if all(value is not leaf for leaf in self.leaves):
                    self.links.append((owner, name, value))
                    self.leaves.append(value)
            elif depth and is_state_object(value):
                self._walk_attributes(value, depth - 1)

    def intact(self) -> bool:
        """True while every inner tensor still hangs where it was read."""
        return all(getattr(owner, name, None) is tensor for owner, name, tensor in self.links)

    def fresh(self) -> Tree:
        """The same tensor read again."""
        return Tree(self.root, self.owner)

    def same_layout(self, other: Tree) -> bool:
        """True if both trees have the same classes and the same dtype, shape and strides, leaf by leaf."""
        if [type(w) for w in self.wrappers] != [type(w) for w in other.wrappers]:
            return False
        return [layout(leaf) for leaf in self.leaves] == [layout(leaf) for leaf in other.leaves]


def is_wrapper(tensor: Any) -> bool:
    """True for a tensor that keeps its bytes in inner tensors."""
    return isinstance(tensor, Tensor) and is_traceable_wrapper_subclass(tensor)


def is_peculiar(tensor: Any) -> bool:
    """True for a tensor class of its own over plain storage: it may keep more tensors in attributes, or in those of its module."""
    return isinstance(tensor, Tensor) and type(tensor) not in (Tensor, torch.nn.Parameter) and not is_wrapper(tensor)


def is_attached(value: Any) -> bool:
    """True for an attribute that belongs to its tensor; a Parameter belongs to a module, which moves it by itself."""
    return isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) and not is_wrapper(value)


def is_state_object(value: Any) -> bool:
    """True for a plain Python object that may hold tensors: not a module, class, function, tensor or built-in."""
    if isinstance(value, (Tensor, torch.nn.Module, type)) or callable(value):
        return False
    kind = type(value)
    return hasattr(value, "__dict__") and kind.__module__.split(".")[0] not in ("builtins", "torch", "weakref", "types")


def children(wrapper: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The inner tensors of a wrapper, each with its attribute name.

    `__tensor_flatten__` comes first. Its list may name things that are no tensors (DTensor), and a class may keep a tensor that it
    does not list (a work space), which still has to travel.
    """
    with torch._C.DisableTorchFunctionSubclass():
        names = list(wrapper.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    names += [name for name in attributes(wrapper) if name not in names]
    seen: set[int] = set()
    for name in names:
        child = getattr(wrapper, name, None)
        if isinstance(child, Tensor) and not isinstance(child, torch.nn.Parameter) and id(child) not in seen:
            seen.add(id(child))
            yield name, child


def attributes(tensor: Tensor) -> dict[str, Any]:
    """The Python attributes of a tensor, in `__dict__` and in `__slots__`."""
    found = dict(getattr(tensor, "__dict__", {}))
    for name in copyreg._slotnames(type(tensor)):  # type: ignore[attr-defined]
        if hasattr(tensor, name):
            found[name] = getattr(tensor, name)
    return found


def set_attribute(tensor: Tensor, name: str, value: Any) -> None:
    """Sets an attribute past any `__setattr__` or property of the class where it lives in `__dict__`."""
    if name in getattr(tensor, "__dict__", {}) or name not in copyreg._slotnames(type(tensor)):  # type: ignore[attr-defined]
        tensor.__dict__[name] = value
    else:
        setattr(tensor, name, value)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """What has to stay when a leaf moves: dtype, shape and strides."""
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def bare(wrapper: Tensor, device: torch.device) -> Tensor:
    """An empty wrapper of the same class, sizes and dtype that reports `device`.

    It is made without the class's constructor: some refuse another device, some have an unflatten that does not work.
    """
    return torch.Tensor._make_wrapper_subclass(
        type(wrapper),
        wrapper.shape,
        strides=wrapper.stride(),
        dtype=wrapper.dtype,
        layout=wrapper.layout,
        device=device,
        requires_grad=False,
    )


def twin(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a wrapper that reports `device`, with its attributes, and with leaves of its own that hold nothing yet."""
    if not is_wrapper(tensor):
        return torch.empty(0, dtype=tensor.dtype, device=device)
    inner = dict(children(tensor))
    copy = bare(tensor, device)
    for name, value in attributes(tensor).items():
        set_attribute(copy, name, value)
    for name, child in inner.items():
        set_attribute(copy, name, twin(child, device))
    if tensor.requires_grad:
        copy.requires_grad_(True)
    return copy
