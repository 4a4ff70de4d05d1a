"""Whether a class packs its bytes differently for each device.

Most wrappers only move their leaves. Some (quanto's TinyGemm, AWQ and Marlin weights) change bytes, layout or even class on the way
from one device type to another, and some refuse the way altogether because their packing means nothing there. The class's own
`.to()` is asked once for every shape of its tensors, and its answer is compared with the moved leaves, byte for byte.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from .layout import byte_range, storage_bytes
from .tree import Tree, attributes

#: Moving is done with torch functions off; a class that only knows `.to()` as one needs them. Older torch has no way to say so.
_torch_function = getattr(torch._C, "_EnableTorchFunction", contextlib.nullcontext)

#: `True` for a signature whose leaves move as they are.
_moves_as_it_is: dict[tuple[Any, ...], bool] = {}


class PackingError(RuntimeError):
    """A tensor class refuses the device. The message names the class, the device and what to do."""


def packed_for(tensor: Tensor, tree: Tree, device: torch.device) -> Tensor | None:
    """The form that the class of `tensor` (a wrapper) gives it on `device`, or None if moving the leaves gives the same.

    Raises:
        PackingError: the class refuses to move to an accelerator; moved by its leaves it would compute wrong numbers.
    """
    if device.type == "meta":
        return None
    signature = _signature(tree, device)
    if _moves_as_it_is.get(signature):
        return None
    moved = moved_by_class(tensor, device)
    same = moved is None or _same_bytes(tree, Tree(moved))
    _moves_as_it_is[signature] = same
    return None if same else moved


def _signature(tree: Tree, device: torch.device) -> tuple[Any, ...]:
    classes = tuple(type(wrapper) for wrapper in tree.wrappers)
    leaves = tuple((leaf.dtype, tuple(leaf.shape), tuple(leaf.stride())) for leaf in tree.leaves)
    settings = tuple(_settings(wrapper) for wrapper in tree.wrappers)
    return device.type, tree.root.device.type, tree.root.dtype, classes, leaves, settings


def _settings(wrapper: Tensor) -> str:
    return repr(sorted((name, repr(value)) for name, value in attributes(wrapper).items() if not _holds_tensor(value)))


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__dict__")


def moved_by_class(tensor: Tensor, device: torch.device) -> Tensor | None:
    """`tensor.to(device)`, which some classes (NF4Tensor) only know as a torch function.

    None where the class has no such operation, so that only its leaves can move.

    Raises:
        PackingError: the class refuses to move to an accelerator.
    """
    try:
        with _torch_function():
            moved = tensor.to(device)
    except Exception as error:
        if device.type == "cpu" or _is_missing(error):
            return None
        raise PackingError(
            f"{type(tensor).__name__} on {tensor.device} cannot be moved to {device}: {error}. Its packing is made for "
            f"{tensor.device.type}; quantise the model with a layout that {device.type} supports, or keep this module out of "
            "group offloading."
        ) from error
    return None if moved is tensor else moved


def _is_missing(error: Exception) -> bool:
    """True for a class that does not implement moving at all, as opposed to one that forbids it."""
    if not isinstance(error, (NotImplementedError, TypeError, AttributeError)):
        return False
    text = str(error)
    return not text or any(name in text for name in ("_to_copy", "aten.to", "aten::to", "__torch_dispatch__"))


def _same_bytes(tree: Tree, moved: Tree) -> bool:
    if not tree.same_layout(moved):
        return False
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in zip(tree.leaves, moved.leaves))


def _bytes(leaf: Tensor) -> Tensor:
    begin, end = byte_range(leaf)
    return storage_bytes(leaf)[begin:end].cpu()
