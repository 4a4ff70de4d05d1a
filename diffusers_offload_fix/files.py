"""Homes in files: groups with `offload_to_disk_path`.

The units of a model are written one after another, in the order in which they were made, into one file. Each unit's host leaves then
are tensors over a private mapping of its bytes: ordinary CPU tensors that can be read, saved and changed, and that take no memory
until they are written to, page by page. Loading reads the file into the staging ring, never through the mapping, except for the
pages that were written since.

Reading a model's own checkpoint in place instead would spare the write. It is not done: whoever saves to the same folder truncates
that very file, and with it the weights; a mapping of it then kills the process, and no look at its time or size is in time.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import backend, disk, pages
from .disk import DiskError, File
from .homes import Home, Keep, leaves_over
from .layout import Layout, byte_range
from .manifest import Head, describe
from .tree import Tree

if TYPE_CHECKING:
    from .binding import Binding
    from .groups import GroupState
    from .unit import Unit

logger = logging.getLogger("diffusers_offload_fix")

#: Bytes that are read at a time where there is no staging ring.
PIECE = 32 * 2**20
#: Room in the head of a file for one leaf.
HEAD = 1024
#: A home is made anew when more than this share of it, and more than this many bytes, were written to by somebody.
WORN_SHARE = 8
WORN_BYTES = 2**20


class FileHome(Home):
    """Bytes of one unit in a file; `slab` is their private mapping."""

    is_file = True

    def __init__(self, layout: Layout, file: File, offset: int, told: bool) -> None:
        block = file.map(offset, layout.nbytes)
        slab = backend.as_tensor(block, 0, layout.nbytes, torch.uint8)
        regions = layout.slices(slab)
        super().__init__(layout, leaves_over(layout, block, regions), regions, slab, False)
        self.file = file
        self.offset = offset
        self._memory = _view(slab)
        self._address = block.ctypes.data
        self._told = told
        # How many bytes were written to, by the start of what was read.
        self._private: dict[int, int] = {}
        self._lasting = False

    def gather(self, target: Tensor, start: int) -> None:
        """Reads the bytes from `start` on into `target`. Several threads may do so at a time, with other bytes each.

        Raises:
            DiskError: the disk does not give them back.
        """
        end = start + len(target)
        into = _view(target)

        def read(first: int, last: int) -> int:
            return self._read(into[first - start : last - start], first, last)

        pieces = disk.parts(start, end)
        # What the page cache has is read by several threads. What the drive has, by one call: the system then asks for much at once,
        # and caches in large pieces, which are read several times faster afterwards.
        if pages.cached(self._address, [at for first, last in pieces for at in (first, last - 1)]):
            private = sum(disk.spread(read, pieces))
        else:
            private = read(start, end)
        self._note(start, end, private)

    def _note(self, start: int, end: int, private: int) -> None:
        """Notes how many of the bytes that were just read are private; other threads may do so meanwhile for other bytes."""
        # Pieces of another size were read before a larger ring was made: what is known of them would count twice.
        for at in [at for at in list(self._private) if start < at < end]:
            del self._private[at]
        self._private[start] = private
        self.worn = sum(list(self._private.values())) > max(self.layout.nbytes // WORN_SHARE, WORN_BYTES) and not self._lasting

    def _read(self, into: memoryview, start: int, end: int) -> int:
        """Reads a part, its private pages from memory; returns how many bytes are known to be private."""
        ranges, private = self._ranges(start, end)
        at = start
        for first, last in [*ranges, (end, end)]:
            if at < first:
                self.file.read(self.offset + at, into[at - start : first - start])
            into[first - start : last - start] = self._memory[first:last]
            at = last
        return private

    def _ranges(self, start: int, end: int) -> tuple[list[tuple[int, int]], int]:
        """What of a part is to be read from memory, and how many bytes of it are known to have been written to."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        told = self._told and self.file.fd is not None
        found = pages.written(self._address + first, end - first) if told else None
        if found is None:
            # All of it through the mapping is right whatever was written, but slower.
            return [(start, end)], 0
        ranges = [(max(begin + first, start), min(last + first, end)) for begin, last in found]
        return ranges, sum(last - begin for begin, last in ranges)

    def copy_to(self, memory: Tensor, non_blocking: bool) -> None:
        """Reads everything into `memory` (a 1-d uint8 tensor on the device), piece by piece; the host waits."""
        total = self.layout.nbytes
        piece = torch.empty(min(PIECE, total), dtype=torch.uint8)
        for start in range(0, total, PIECE):
            part = piece[: total - start]
            self.gather(part, start)
            memory[start : start + len(part)].copy_(part)
        self.layout.unpack(memory)

    def written(self) -> None:
        # What forward changes every time had better stay in memory.
        self._lasting = True

    def keep(self) -> None:
        """Keeps what was written to it in memory."""
        self.worn, self._lasting = False, True


def write(units: list[Unit]) -> None:
    """Makes homes for some units of one folder, in one file, from what their tensors hold now.

    Raises:
        DiskError: the file could not be made; every tensor holds what it held, where it was.
    """
    wanted = [unit for unit in units if unit.offload_device.type == "cpu" and _nbytes(unit)]
    if wanted:
        _Writer(wanted).write()
    for unit in units:
        # Where weights are offloaded to another device than the host, they stay there; and no file holds nothing.
        if unit not in wanted:
            unit.make_home_in_memory(Keep.AS_IS)


def write_all(units: Iterable[Unit]) -> None:
    """As `write`, for units of any folders: a file for each folder."""
    folders: dict[str | None, list[Unit]] = {}
    for unit in units:
        folders.setdefault(unit.folder, []).append(unit)
    for part in folders.values():
        write(part)


def renew(unit: Unit, groups: Iterable[GroupState]) -> None:
    """Makes the home of a unit anew that is needed now, and with it those of others that need it.

    What cannot be written stays in memory, with a warning.
    """
    units = [unit, *(other for other in _others(groups, unit) if not other.intact() or other.home.worn)]
    try:
        write(units)
    except DiskError as error:
        # The text only: a handler that keeps the error would keep everything that its traceback holds.
        logger.warning("%s Weights that were changed stay in memory.", str(error))
        for each in units:
            if each.intact():
                each.home.keep()
            else:
                each.make_home_in_memory(Keep.AS_IS)


def _others(groups: Iterable[GroupState], unit: Unit) -> list[Unit]:
    """Units of the same folder that are neither on the device nor on their way there."""
    found: dict[int, Unit] = {}
    for state in [state for state in groups if not state.active and not state.passive]:
        with contextlib.suppress(RuntimeError):
            if not state.current():
                state.plan()
        found |= {id(other): other for other in state.units if other.slot is None and not other.bound}
    return [other for other in found.values() if other is not unit and (other.keep, other.folder) == (unit.keep, unit.folder)]


def _nbytes(unit: Unit) -> int:
    ranges = (byte_range(leaf) for entry in unit.entries for leaf in Tree(entry.tensor, entry.owner).leaves)
    return sum(end - begin for begin, end in ranges)


def _leaf_room(unit: Unit) -> int:
    # The form for the device may have other leaves than the tensor, and both are written.
    return sum(4 + 4 * len(Tree(entry.tensor, entry.owner).leaves) for entry in unit.entries)


class _Writer:
    """Writes the file of some units."""

    def __init__(self, units: list[Unit]) -> None:
        assert units[0].folder is not None
        self._units = units
        self._file = File(units[0].folder)
        self._start = self._offset = _page(HEAD * (8 + sum(map(_leaf_room, units))))
        self._head = Head()
        self._told = False

    def write(self) -> None:
        """Writes it; only when all of it is on the disk, the tensors change."""
        self._file.reserve(0, self._start + sum(map(_nbytes, self._units)))
        self._told = pages.told(self._file.map(0, mmap.PAGESIZE))
        done = [(unit, *self._unit(str(index), unit)) for index, unit in enumerate(self._units)]
        self._file.write(0, memoryview(self._head.dumps(self._start)))
        self._file.resize(self._start + self._head.end)
        self._file.flush()
        for unit, bindings, home, rest in done:
            _adopt_rest(bindings, rest)
            unit.adopt(bindings, home)
        self._file.spare()

    def _unit(self, name: str, unit: Unit) -> tuple[list[Binding], FileHome, list[Tensor]]:
        bindings, leaves, packs = unit.cargo()
        described = [describe(binding.form, len(binding.cargo)) for binding in bindings]
        home = self._home(name, Layout(leaves, packs), described)
        rest = [leaf for binding in bindings for leaf in binding.rest]
        if not rest:
            return bindings, home, []
        self._park_forms(unit, bindings, home)
        described = [describe(binding.tensor, len(binding.rest)) for binding in bindings if binding.rest]
        return bindings, home, self._home(f"{name}.host", Layout(rest), described).leaves

    @staticmethod
    def _park_forms(unit: Unit, bindings: list[Binding], home: FileHome) -> None:
        # A form that was just made for the device is nobody else's: it need not stay there until the other units are written.
        start = 0
        for entry, binding in zip(unit.entries, bindings):
            end = start + len(binding.cargo)
            if binding.rest and entry.binding is not binding:
                binding.adopt(home.leaves[start:end])
            start = end

    def _home(self, name: str, layout: Layout, described: list[dict[str, Any]]) -> FileHome:
        self._file.reserve(self._offset, layout.nbytes)
        for region, source in zip(layout.regions, layout.sources):
            for start in range(0, len(source), PIECE):
                part = source[start : start + PIECE].cpu()
                self._file.write(self._offset + region.offset + start, _view(part))
        layout.sources.clear()
        self._head.add(name, layout, self._offset - self._start, described)
        home = FileHome(layout, self._file, self._offset, self._told)
        self._offset += _page(layout.nbytes)
        return home


def _adopt_rest(bindings: list[Binding], rest: list[Tensor]) -> None:
    for binding in bindings:
        count = len(binding.rest)
        if count:
            binding.adopt_rest(rest[:count])
            rest = rest[count:]


def _view(bytes_: Tensor) -> memoryview:
    array: Any = bytes_.numpy()
    return memoryview(array)


def _page(nbytes: int) -> int:
    return -(-nbytes // disk.PAGE) * disk.PAGE
