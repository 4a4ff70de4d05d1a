"""Homes: where the bytes of a unit live while it is offloaded.

A home is built from the leaves of a unit, wherever they are at that moment, and gives each of them back as a host tensor. Slabs are
allocated here and nowhere else.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from . import adoption, backend
from .layout import Layout, Place

logger = logging.getLogger("diffusers_offload_fix")

_warned: set[str] = set()


class Home:
    """Host memory of one unit.

    Attributes:
        layout: the place of every leaf in a buffer of `layout.nbytes` bytes.
        leaves: the host tensors, in the order of the leaves that the home was made from.
        slab: all bytes as one 1-d uint8 tensor, or None if every leaf is a tensor by itself.
        pinned: True if the slab is pinned, so that it travels in one asynchronous copy.
        regions: the bytes of each region (1-d uint8 tensors).
        worn: True if the home does not hold its bytes where it was meant to any more, so that it is to be made anew.
        is_file: True if reading the bytes may take a while.
    """

    worn = False
    is_file = False

    def __init__(self, layout: Layout, leaves: list[Tensor], regions: list[Tensor], slab: Tensor | None, pinned: bool) -> None:
        self.layout = layout
        self.leaves = leaves
        self.regions = regions
        self.slab = slab
        self.pinned = pinned

    def written(self) -> None:
        """Told when forward changed some of the leaves."""

    def keep(self) -> None:
        """Told that it cannot be made anew although it is worn."""

    def holds(self, leaf: Tensor) -> bool:
        """True if a host tensor lies in the slab."""
        if self.slab is None:
            return False
        start = self.slab.data_ptr()
        return start <= leaf.data_ptr() < start + len(self.slab)

    def gather(self, target: Tensor, start: int) -> None:
        """Copies the bytes from `start` on into `target` (a 1-d uint8 host tensor), as many as it holds."""
        end = start + len(target)
        if self.slab is not None:
            target.copy_(self.slab[start:end])
            return
        for place, region in zip(self.layout.regions, self.regions):
            first, last = max(place.offset, start), min(place.offset + place.nbytes, end)
            if first < last:
                target[first - start : last - start].copy_(region[first - place.offset : last - place.offset])

    def copy_to(self, memory: Tensor, non_blocking: bool) -> None:
        """Copies everything to `memory` (a 1-d uint8 tensor on the device) on the current stream: a slab in one copy."""
        if self.slab is not None:
            target = memory if len(memory) == len(self.slab) else memory[: self.layout.nbytes]
            target.copy_(self.slab, non_blocking=non_blocking)
        else:
            for target, region in zip(self.layout.slices(memory), self.regions):
                target.copy_(region, non_blocking=non_blocking)
        self.layout.unpack(memory)


class Keep(Enum):
    """How a unit is to be kept on the host."""

    #: One slab of pinned memory.
    PINNED = "pinned"
    #: One slab of ordinary memory, which passes through the staging ring in few, large pieces.
    SLAB = "slab"
    #: As it is: tensors that are on the host already are not copied.
    AS_IS = "as it is"
    #: In a file, together with other units (see `files`).
    FILE = "file"


def make_home(
    leaves: list[Tensor], device: torch.device, offload_device: torch.device, keep: Keep, packs: list[bool] | None = None
) -> Home:
    """A home for `leaves` (strided tensors on any device), to be streamed to `device`; `packs` as for a layout.

    Where a slab is wanted and its memory cannot be had, the leaves stay as they are.
    """
    layout = Layout(leaves, packs)
    if keep is not Keep.AS_IS and layout.nbytes and offload_device.type == "cpu":
        try:
            return _adopted_home(leaves, packs, device, keep is Keep.PINNED) or _slab_home(layout, device, keep is Keep.PINNED)
        except backend.PinError as error:
            warn_unpinned(layout.nbytes, error)
        except (MemoryError, OSError) as error:
            logger.warning("No slab of %d bytes could be allocated (%s); the weights stay where they are.", layout.nbytes, error)
    return _plain_home(layout, offload_device)


def _adopted_home(leaves: list[Tensor], packs: list[bool] | None, device: torch.device, pinned: bool) -> Home | None:
    parts = adoption.adopt(leaves, packs, pinned, lambda new: _slab_home(Layout(new), device, pinned))
    if parts is None:
        return None
    layout, found, regions = parts
    return Home(layout, found, regions, regions[0] if len(regions) == 1 else None, pinned)


def _slab_home(layout: Layout, device: torch.device, pinned: bool) -> Home:
    def fill(block: backend.Block) -> None:
        for region, source in zip(layout.slices(backend.as_tensor(block, 0, layout.nbytes, torch.uint8)), layout.sources):
            region.copy_(source)

    block = backend.pinned_memory(layout.nbytes, device, fill) if pinned else backend.ordinary_memory(layout.nbytes, fill)
    layout.sources.clear()
    adoption.remember(block, pinned)
    slab = backend.as_tensor(block, 0, layout.nbytes, torch.uint8)
    regions = layout.slices(slab)
    return Home(layout, leaves_over(layout, block, regions), regions, slab, pinned)


def leaves_over(layout: Layout, block: Any, regions: list[Tensor]) -> list[Tensor]:
    """The leaves over a block of memory, each with a storage of its own unless it shares its memory with another."""
    return [_own_storage(layout, place, block, regions) for place in layout.places]


def _own_storage(layout: Layout, place: Place, block: Any, regions: list[Tensor]) -> Tensor:
    region = layout.regions[place.region]
    if region.places > 1 or not place.nbytes:
        return place.view(regions[place.region])
    flat = backend.as_tensor(block, region.offset + place.offset, place.nbytes, place.dtype)
    return flat.as_strided(place.shape, place.stride)


def _plain_home(layout: Layout, offload_device: torch.device) -> Home:
    regions = [_unpinned(source, offload_device) for source in layout.sources]
    layout.sources.clear()
    return Home(layout, layout.views(regions), regions, None, False)


def _unpinned(source: Tensor, offload_device: torch.device) -> Tensor:
    # A group that was pinned before and is not to be any more must not keep its slab alive.
    return source.clone() if backend.is_pinned_here(source) else source.to(offload_device)


def warn_unpinned(nbytes: int, error: Exception) -> None:
    """Says once, at level WARNING, that a group stays unpinned: how many bytes, why, and what it costs."""
    reason = str(error)
    if "pin" in _warned:
        logger.debug("a group of %d bytes stays unpinned: %s", nbytes, reason)
        return
    _warned.add("pin")
    logger.warning(
        "A group of %d bytes (%.1f MiB) stays in unpinned memory: %s. The output is the same, but its copies to the device are "
        "several times slower and overlap less. Free or unlock host memory, or pass low_cpu_mem_usage=True. "
        "Further groups that cannot be pinned are logged at level DEBUG.",
        nbytes,
        nbytes / 2**20,
        reason,
    )
