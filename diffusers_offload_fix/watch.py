"""Whether tensors still hold what they were given, and whether they were changed in place.

This is asked for every tensor of every group in every forward, so it reads whole lists at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

_dtype, _shape, _version = attrgetter("dtype"), attrgetter("shape"), attrgetter("_version")

#: Address, dtype, shape and strides of some dense tensors.
Holding = tuple[list[int], list[Any], list[Any], list[Any]]


def holding(tensors: Sequence[Tensor]) -> Holding:
    """What dense tensors hold: two that read the same memory in the same way have equal answers."""
    return (
        list(map(Tensor.data_ptr, tensors)),
        list(map(_dtype, tensors)),
        list(map(_shape, tensors)),
        list(map(Tensor.stride, tensors)),
    )


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where dense tensors lie: enough for inner tensors, which only their own library reads."""
    return list(map(Tensor.data_ptr, tensors))


def unchanged(leaf: Tensor, given: Tensor) -> bool:
    """True if `leaf` holds what `given` holds."""
    return holding([leaf]) == holding([given])


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """In-place change counters; a tensor without one counts as unchanged."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [tensor._version if is_counted(tensor) else 0 for tensor in tensors]


def is_counted(tensor: Tensor) -> bool:
    """False for a tensor that was made in inference mode: it keeps no counter, whatever data it is given later."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def attribute_ids(wrappers: Sequence[Tensor]) -> list[list[int]]:
    """Identities of everything in the wrappers' `__dict__`: equal while no attribute was set, replaced or removed."""
    return [list(map(id, wrapper.__dict__.values())) for wrapper in wrappers]
