"""Rates of a drive: the files of a model, read from end to end, beside the forwards that read the same files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

#: Bytes that one call reads.
PIECE = 32 << 20


class Drive:
    """The files that hold a model's weights: those in a folder, and those without a name that the plugin has.

    Attributes:
        nbytes: how many bytes they hold.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._open() as descriptors:
            self.nbytes = sum(os.fstat(fd).st_size for fd in descriptors)

    @contextmanager
    def _open(self) -> Iterator[list[int]]:
        from diffusers_offload_fix import disk

        named = [os.open(path, os.O_RDONLY) for path in sorted(self._folder.rglob("*")) if path.is_file()]
        # Of their own, so that reading here leaves no trace in how the system reads ahead for the plugin.
        named += [os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY) for file in disk.files() if file.fd is not None]
        try:
            yield named
        finally:
            for fd in named:
                os.close(fd)

    def forget(self) -> None:
        """Takes the files out of the page cache."""
        with self._open() as descriptors:
            for fd in descriptors:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self) -> float:
        """The rate in GB/s (1e9) at which one thread reads the files in order."""
        # Touched before, and held: the memory that is read into costs nothing then.
        target: Any = torch.ones(PIECE, dtype=torch.uint8).numpy()
        with self._open() as descriptors:
            start = time.perf_counter()
            for fd in descriptors:
                at = 0
                while done := os.preadv(fd, [target], at):
                    at += done
            return self.nbytes / (time.perf_counter() - start) / 1e9

    def rates(self, forward: Callable[[], float], times: int = 2) -> dict[str, float]:
        """Sequential rates and those of a forward (which returns its milliseconds), with an empty page cache and with a full one.

        Empty where the system has no way to empty it.
        """
        if not hasattr(os, "posix_fadvise"):
            return {}
        cold, cold_forward = [], []
        for _ in range(times):
            self.forget()
            cold.append(self.read())
            self.forget()
            cold_forward.append(forward())
        self.read()
        warm = max(self.read() for _ in range(times))
        warm_forward = min(forward() for _ in range(times + 1))
        return {
            "disk_bytes": self.nbytes,
            "sequential_cold_gbs": max(cold),
            "sequential_warm_gbs": warm,
            "cold_ms": min(cold_forward),
            "cold_gbs": self.nbytes / min(cold_forward) / 1e6,
            "warm_gbs": self.nbytes / warm_forward / 1e6,
        }
