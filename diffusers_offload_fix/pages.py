"""What the kernel knows of the pages of a private mapping: which were written, and which are in the page cache.

A page that was written holds what the file does not. Versions of tensors do not tell: `weight.data += delta`, numpy views and other
libraries write without counting. The kernel knows, page by page, and says so in `/proc/self/pagemap` to any process about itself.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy

_PAGEMAP = "/proc/self/pagemap"
_ENTRY = 8
#: Top three bits of an entry: present, swapped, of a file. A page that is there but is no file's was written.
_WRITTEN = (0b100, 0b010)


def written(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Ranges of `nbytes` bytes from `address` on, relative to it, in pages that were written; None where the system does not say.

    The address is a multiple of a page. Ranges end at `nbytes`.
    """
    page = mmap.PAGESIZE
    count = -(-nbytes // page)
    try:
        # Opened each time: after a fork an open one would speak of the parent.
        fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.pread(fd, count * _ENTRY, address // page * _ENTRY)
    except OSError:
        return None
    finally:
        os.close(fd)
    if len(data) != count * _ENTRY:
        return None
    entries = numpy.frombuffer(data, dtype=numpy.uint64)
    if not entries.any():
        return []
    top = entries >> numpy.uint64(61)
    marks = (top == _WRITTEN[0]) | (top == _WRITTEN[1])
    edges = numpy.flatnonzero(numpy.diff(numpy.concatenate(([False], marks, [False])).astype(numpy.int8)))
    return [(int(start) * page, min(int(end) * page, nbytes)) for start, end in zip(edges[::2], edges[1::2])]


def told(block: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]) -> bool:
    """True if the system tells the truth about a private mapping of one page, which is written for the purpose."""
    address, nbytes = block.ctypes.data, len(block)
    value = block[0]
    if written(address, nbytes) != []:
        return False
    block[0] = value
    return written(address, nbytes) == [(0, nbytes)]


def cached(address: int, offsets: list[int]) -> bool:
    """True if the pages at these offsets from `address` (a multiple of a page) can be read without waiting for the drive."""
    mincore = system("mincore", ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p])
    answer = ctypes.create_string_buffer(1)
    for offset in offsets if mincore is not None else ():
        page = (address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        if mincore(page, 1, answer) or not answer.raw[0] & 1:
            return False
    return mincore is not None


@functools.cache
def _library() -> Any:
    # Elsewhere than on Linux, flags and types of these calls differ.
    return ctypes.CDLL(None, use_errno=True) if os.path.exists("/proc/self/maps") else None


def system(name: str, result: Any, arguments: list[Any]) -> Any:
    """A function of the C library, or None where there is none that we know."""
    function = getattr(_library(), name, None)
    if function is not None:
        function.restype, function.argtypes = result, arguments
    return function
