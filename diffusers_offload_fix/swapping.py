"""Swapping: how one tensor object takes what another has, its data, its class or its attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tree import attributes, bare, set_attribute


def inference_alias(value: Tensor) -> Tensor:
    """The same memory as an inference tensor: one that was made in inference mode cannot take the data of any other kind."""
    with torch.inference_mode():
        alias = torch.empty(0, dtype=value.dtype, device=value.device)
        return alias.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def set_leaves(leaves: list[Tensor], values: list[Tensor]) -> None:
    """Gives each leaf the data of a value."""
    for leaf, value in zip(leaves, values):
        leaf.data = value


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


def exchange(tensor: Tensor, other: Tensor, device: torch.device, in_place: bool) -> None:
    """Swaps two wrappers of different packing; `tensor` reports `device` afterwards. `in_place`: without torch's own swap."""
    if not in_place and swap(tensor, other):
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
