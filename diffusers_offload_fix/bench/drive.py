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
#: Bytes that a process reads in a moment although it reads no weights.
SMALL = 1 << 20


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

    def read(self) -> None:
        """Reads the files in order, by one thread."""
        # Touched before, and held: the memory that is read into costs nothing then.
        target: Any = torch.ones(PIECE, dtype=torch.uint8).numpy()
        with self._open() as descriptors:
            for fd in descriptors:
                at = 0
                while done := os.preadv(fd, [target], at):
                    at += done

    def rates(self, forward: Callable[[], object], times: int = 5) -> dict[str, float]:
        """Rates in GB/s (1e9) of reading in order and of forwards, by turns, with an empty page cache and with a full one.

        A forward's is that of the bytes which were read while it ran: what comes first in the next one is read after its end.
        Empty where the system has no way to empty the cache.
        """
        if not hasattr(os, "posix_fadvise"):
            return {}
        (cold, _), (cold_forward, seconds) = self._turns(forward, times, self.forget)
        (warm, _), (warm_forward, _) = self._turns(forward, times, lambda: None)
        return {
            "disk_bytes": self.nbytes,
            "sequential_cold_gbs": cold,
            "sequential_warm_gbs": warm,
            "cold_ms": 1000 * seconds,
            "cold_gbs": cold_forward,
            "warm_gbs": warm_forward,
        }

    def _turns(self, forward: Callable[[], object], times: int, before: Callable[[], None]) -> list[tuple[float, float]]:
        """The rate (GB/s) and the mean time (seconds) of reading in order, and those of forwards."""
        seconds, nbytes = [0.0, 0.0], [0, 0]
        for _ in range(times):
            for turn, what in enumerate((self.read, forward)):
                _settle()
                before()
                start, had = time.perf_counter(), bytes_read()
                what()
                seconds[turn] += time.perf_counter() - start
                read = bytes_read() - had
                nbytes[turn] += read if read > SMALL else self.nbytes
        return [(total / spent / 1e9, spent / times) for total, spent in zip(nbytes, seconds)]


def bytes_read() -> int:
    """Bytes that this process has read from files until now, cached or not; 0 where the system does not count them."""
    try:
        counters = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    return int(counters.split("rchar:")[1].split()[0])


def _settle(pause: float = 0.1, limit: float = 10.0) -> None:
    """Waits until nothing is being read any more, `limit` seconds at most: what is read ahead would slow down what is timed next."""
    end = time.monotonic() + limit
    before = -SMALL
    while bytes_read() - before > SMALL and time.monotonic() < end:
        before = bytes_read()
        time.sleep(pause)
