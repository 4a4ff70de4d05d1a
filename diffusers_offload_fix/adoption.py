"""Slabs that are used again: leaves that lie in a slab already are not copied when their groups are made anew.

Loading an adapter removes and re-applies the hooks of the whole pipeline, and gives some blocks a few more tensors. Only these get new
memory; the old slab travels beside it, in a copy of its own.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backend
from .layout import Layout, Place, Region, align, byte_range

#: The part of a slab that has to be in use still: the rest would travel, and take host memory, for nothing.
USED = 0.75
#: Slabs of one home: each is a copy of its own.
SLABS = 4

_slabs: dict[bool, weakref.WeakValueDictionary[int, Any]] = {
    True: weakref.WeakValueDictionary(),
    False: weakref.WeakValueDictionary(),
}

Parts = tuple[Layout, list[Tensor], list[Tensor]]


def remember(block: Any, pinned: bool) -> None:
    """Notes a block that a slab was made of; it is forgotten when the block is let go of."""
    _slabs[pinned][block.ctypes.data] = block


def adopt(leaves: list[Tensor], packs: list[bool] | None, pinned: bool, make: Callable[[list[Tensor]], Any]) -> Parts | None:
    """A layout over slabs that hold most of the leaves already, the leaves in it, and its regions; None where there are none.

    Args:
        leaves: strided tensors on any device.
        packs: as for a layout.
        pinned: what kind of slab is wanted.
        make: makes a home in one new slab for the leaves that lie nowhere yet.
    """
    blocks, inside, outside = _sorted(leaves, _slabs[pinned])
    if not 0 < len(inside) < SLABS or not all(_is_worth_it(blocks[where], leaves, held) for where, held in inside.items()):
        return None
    layout = Layout([])
    layout.places = [None] * len(leaves)  # type: ignore[list-item]
    found = list(leaves)
    regions: list[Tensor] = []
    for where, held in inside.items():
        for index in held:
            layout.places[index] = _place(leaves[index], len(regions), leaves[index].data_ptr() - where)
            found[index] = leaves[index].data
        regions.append(backend.as_tensor(blocks[where], 0, blocks[where].nbytes, torch.uint8))
    if outside:
        home = make([leaves[index] for index in outside])
        for index, place, leaf in zip(outside, home.layout.places, home.leaves):
            layout.places[index] = _place(leaf, len(regions), home.layout.regions[place.region].offset + place.offset)
            found[index] = leaf
        regions.append(home.slab)
    _add_regions(layout, regions)
    layout.pack(leaves, packs)
    return layout, found, regions


def _sorted(leaves: list[Tensor], slabs: Any) -> tuple[dict[int, Any], dict[int, list[int]], list[int]]:
    """The slabs by address, the indices of the leaves in each of them, and those of the leaves in none."""
    blocks = dict(slabs.items())
    starts = sorted(blocks)
    inside: dict[int, list[int]] = {}
    outside = []
    for index, leaf in enumerate(leaves):
        first, last = byte_range(leaf)
        address = leaf.data_ptr()
        at = bisect.bisect_right(starts, address) - 1
        is_host = leaf.device.type == "cpu" and first < last and at >= 0
        if is_host and address + last - first <= starts[at] + blocks[starts[at]].nbytes:
            inside.setdefault(starts[at], []).append(index)
        else:
            outside.append(index)
    return blocks, inside, outside


def _is_worth_it(block: Any, leaves: list[Tensor], held: list[int]) -> bool:
    used = {leaves[index].data_ptr(): leaves[index] for index in held}
    return sum(align(last - first) for first, last in map(byte_range, used.values())) >= USED * int(block.nbytes)


def _place(leaf: Tensor, region: int, offset: int) -> Place:
    first, last = byte_range(leaf)
    return Place(region, offset, last - first, leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()))


def _add_regions(layout: Layout, regions: list[Tensor]) -> None:
    for number, region in enumerate(regions):
        places = sum(place.region == number for place in layout.places)
        layout.regions.append(Region(layout.nbytes, len(region), places))
        layout.nbytes += align(len(region))
    layout.device_nbytes = layout.nbytes
