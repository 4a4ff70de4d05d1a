"""Where each leaf lies inside one buffer.

Leaves that share memory (a view and its base) keep sharing it: overlapping byte ranges of one storage become one region. Regions lie
one after another at 256-byte-aligned offsets, so that any dtype and any kernel finds its data aligned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: CUDA's own allocations are aligned so, and vectorised kernels and TMA descriptors rely on it.
ALIGNMENT = 256
#: A region starts at a multiple of the widest dtype's size (complex128), so that every leaf in it keeps its own alignment.
STORAGE_ALIGNMENT = 16


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Place:
    """One leaf inside a region: `offset` and `nbytes` in bytes from the start of the region, shape and strides in elements.

    `dense` is where the leaf lies on the device if that is not the same place: its offset in the whole buffer, and its strides.
    """

    region: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dense: tuple[int, tuple[int, ...]] | None = None

    def view(self, region: Tensor) -> Tensor:
        """The leaf as a view of its region's bytes (a 1-d uint8 tensor)."""
        if not self.nbytes:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=region.device)
        flat = region[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


@dataclass(frozen=True)
class Region:
    """A run of `nbytes` bytes at `offset` in the buffer, which holds `places` leaves."""

    offset: int
    nbytes: int
    places: int


class Layout:
    """The places of `leaves` (strided tensors on any device) in one buffer.

    `nbytes` travel; on the device the buffer has `device_nbytes`. A leaf with gaps or overlaps travels as it lies, so that the host
    keeps its strides, and is laid out densely on arrival if `packs` says so: that is what `.to(device)` makes of it, and a kernel
    may round differently for other strides.

    `sources` are the bytes of each region where the leaves are now (1-d uint8 views of their storages); whoever has copied them
    empties the list, so that the layout does not keep the old memory.
    """

    def __init__(self, leaves: list[Tensor], packs: list[bool] | None = None) -> None:
        self.sources: list[Tensor] = []
        self.regions: list[Region] = []
        self.places: list[Place] = [None] * len(leaves)  # type: ignore[list-item]
        self.nbytes = 0
        ranges = sorted((leaf.untyped_storage().data_ptr(), *byte_range(leaf), index) for index, leaf in enumerate(leaves))
        for run in _overlapping(ranges):
            self._add(leaves, run)
        self.device_nbytes = self.nbytes
        self.pack(leaves, packs)

    def pack(self, leaves: list[Tensor], packs: list[bool] | None) -> None:
        """Gives the leaves that `packs` names a dense place on the device."""
        for index, leaf in enumerate(leaves):
            if packs is not None and packs[index]:
                self._pack(index, leaf)

    def _add(self, leaves: list[Tensor], run: list[tuple[int, int, int, int]]) -> None:
        begin, end = run[0][1] // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT, max(entry[2] for entry in run)
        self.sources.append(storage_bytes(leaves[run[0][3]])[begin:end])
        for _, first, last, index in run:
            leaf = leaves[index]
            self.places[index] = Place(
                len(self.regions), first - begin, last - first, leaf.dtype, tuple(leaf.shape), tuple(leaf.stride())
            )
        self.regions.append(Region(self.nbytes, end - begin, len(run)))
        self.nbytes += align(end - begin)

    def _pack(self, index: int, leaf: Tensor) -> None:
        stride = tuple(torch.empty_like(leaf, device="meta").stride())
        if stride != tuple(leaf.stride()):
            self.places[index] = replace(self.places[index], dense=(self.device_nbytes, stride))
            self.device_nbytes += align(leaf.numel() * leaf.element_size())

    def device_views(self, memory: Tensor) -> list[Tensor]:
        """Every leaf as it lies in device memory (a 1-d uint8 tensor of `device_nbytes` bytes)."""
        views = self.views(self.slices(memory))
        for index, place in enumerate(self.places):
            if place.dense is not None:
                views[index] = self._dense_view(place, memory)
        return views

    @staticmethod
    def _dense_view(place: Place, memory: Tensor) -> Tensor:
        assert place.dense is not None
        start, stride = place.dense
        count = torch.Size(place.shape).numel()
        flat = memory[start : start + count * place.dtype.itemsize].view(place.dtype)
        return flat.as_strided(place.shape, stride, flat.storage_offset())

    def unpack(self, memory: Tensor) -> None:
        """Lays out what has arrived in device memory: on the stream that copied it."""
        if self.device_nbytes == self.nbytes:
            return
        regions = self.slices(memory)
        for place in self.places:
            if place.dense is not None:
                self._dense_view(place, memory).copy_(place.view(regions[place.region]))

    def views(self, regions: list[Tensor]) -> list[Tensor]:
        """Every leaf as a view of the given regions (1-d uint8 tensors, in the order of `regions`)."""
        return [place.view(regions[place.region]) for place in self.places]

    def slices(self, buffer: Tensor) -> list[Tensor]:
        """The regions of one buffer (a 1-d uint8 tensor of at least `nbytes`)."""
        return [buffer[region.offset : region.offset + region.nbytes] for region in self.regions]


def _overlapping(ranges: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Runs of `(storage, begin, end, index)` whose byte ranges overlap; empty ranges stand alone."""
    runs: list[list[tuple[int, int, int, int]]] = []
    reach = -1
    for entry in ranges:
        storage, begin, end, _ = entry
        if runs and begin < end and storage == runs[-1][0][0] and begin < reach:
            runs[-1].append(entry)
        else:
            runs.append([entry])
            reach = -1
        reach = max(reach, end)
    return runs


def byte_range(leaf: Tensor) -> tuple[int, int]:
    """First and one-past-last byte that a dense leaf touches in its storage, gaps and stride 0 included."""
    if leaf.numel() == 0:
        return 0, 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride()))
    begin = int(leaf.storage_offset()) * leaf.element_size()
    return begin, begin + span * leaf.element_size()


def storage_bytes(leaf: Tensor) -> Tensor:
    """The whole storage of a leaf as a 1-d uint8 tensor on its device, sharing the memory."""
    return torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(leaf.untyped_storage())
