"""The staging ring: a few pinned buffers through which unpinned weights reach the device at the speed of the bus.

A copy from unpinned memory runs at a fraction of the bus, and blocks. Copying into pinned memory first is several times faster, and
lets the device's copies overlap with the next buffer's filling, at the price of a few buffers instead of a pinned copy of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backend
from .homes import Home
from .layout import align

#: Bytes of one buffer: large enough that a copy's fixed cost vanishes, small enough that filling and sending overlap.
CHUNK = 32 * 2**20
#: One buffer is filled while one is sent; the third evens out their speeds. With the size below: never over three groups.
COUNT = 3


class Ring:
    """`COUNT` pinned buffers for copies to one device.

    Args:
        largest: bytes of the largest unit that will pass through.

    Raises:
        backend.PinError: the buffers cannot be pinned.
    """

    def __init__(self, largest: int, streams: backend.Streams) -> None:
        self.largest = largest
        self.chunk = min(CHUNK, align(largest))
        self._streams = streams
        blocks = [backend.pinned_memory(self.chunk, streams.device) for _ in range(COUNT)]
        self._buffers = [backend.as_tensor(block, 0, self.chunk, torch.uint8) for block in blocks]
        self._sent: list[Any] = [None] * COUNT
        self._next = 0

    def send(self, home: Home, memory: Tensor, stream: Any) -> Any:
        """Copies a home to `memory` (a 1-d uint8 tensor on the device) on `stream`; returns the event after which it is there."""
        total = home.layout.nbytes
        # Every step back into Python may wait for the thread that runs the model: few, long ones.
        with self._streams.on(stream):
            for start in range(0, total, self.chunk):
                index, buffer = self._free()
                part = buffer if total - start >= self.chunk else buffer[: total - start]
                home.gather(part, start)
                memory[start : start + len(part)].copy_(part, non_blocking=True)
                self._sent[index] = self._streams.mark(stream)
            home.layout.unpack(memory)
        return self._streams.mark(stream)

    def _free(self) -> tuple[int, Tensor]:
        index, self._next = self._next, (self._next + 1) % COUNT
        if self._sent[index] is not None:
            self._sent[index].synchronize()
        return index, self._buffers[index]
