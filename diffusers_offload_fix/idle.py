"""Device memory that is kept between the forwards of a loop, and who gives it back.

A denoising loop calls one model again and again. Between two calls its lane keeps the device slots and has the first groups of the
next call copied ahead. They are given back when the loop ends, as soon as another group-offloaded model runs on the device, and when
the loop pauses for `PAUSE` seconds.

Only a pipeline's own loop counts (`loops` patches its progress bar). Around a call that somebody makes by hand nothing is kept: a
weight may be changed through `.data` there, which leaves no trace that could tell that a copy made before is stale.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .lane import Lane

#: Seconds after which a loop that runs no forward keeps nothing any more.
PAUSE = 0.5
#: Seconds between two looks at what has paused.
LOOK = 0.25

#: Re-entrant, both: the garbage collector may end a loop in the middle of anything.
_guard = threading.RLock()
#: Held by the thread that gives back, so that another which asks for the same finds it done.
_clearing = threading.RLock()
_resting: weakref.WeakSet[Lane] = weakref.WeakSet()
_watcher: threading.Thread | None = None
#: How many loops each thread is in.
_open: dict[int, int] = {}


def in_loop() -> bool:
    """True while the calling thread is in a loop."""
    return threading.get_ident() in _open


class Loop:
    """A loop of the calling thread, from now on until `end`."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._over = False
        with _guard:
            _open[self._thread] = _open.get(self._thread, 0) + 1

    def end(self, wait: bool = True) -> None:
        """Gives back at once what was kept for the loop. Harmless the second time; any thread may call it.

        Args:
            wait: wait for other threads. Not for the garbage collector: its thread may hold what they wait for.
        """
        with _guard:
            if self._over:
                return
            self._over = True
            left = _open[self._thread] = _open[self._thread] - 1
            if not left:
                del _open[self._thread]
        if not left:
            clear(wait=wait)


@contextlib.contextmanager
def loop() -> Iterator[None]:
    """Marks a loop over forwards between which no weight is changed, other than by operations that torch counts."""
    mark = Loop()
    try:
        yield
    finally:
        mark.end()


def rest(lane: Lane) -> None:
    """Notes that a lane keeps memory after a forward; it is cleared if no other forward follows within `PAUSE` seconds."""
    global _watcher
    with _guard:
        _resting.add(lane)
        # A thread does not survive a fork.
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_watch, name="offload-idle", daemon=True)
            _watcher.start()


def make_way(coming: Lane) -> None:
    """Clears every other lane that keeps memory on the device of `coming`."""
    # The caller holds the lock of its lane: it must wait for nobody here.
    if _resting and _clearing.acquire(blocking=False):
        try:
            for lane in _lanes():
                if lane is not coming and lane.device == coming.device:
                    _clear(lane, wait=False)
        finally:
            _clearing.release()


def clear(device: torch.device | None = None, wait: bool = True) -> None:
    """Gives back at once what lanes keep between forwards, on one device or on all; `wait` for other threads that do so."""
    if not _clearing.acquire(blocking=wait):
        return
    try:
        for lane in _lanes():
            if device is None or lane.device == device:
                _clear(lane, wait)
    finally:
        _clearing.release()


def _lanes() -> list[Lane]:
    with _guard:
        return list(_resting)


def _clear(lane: Lane, wait: bool) -> None:
    # Out first: what its own thread adds while this one clears must stay.
    with _guard:
        _resting.discard(lane)
    if not lane.clear(wait):
        with _guard:
            _resting.add(lane)


def _clear_paused(now: float) -> None:
    # In a function of its own: the thread must not keep the last lane alive while it sleeps.
    with _clearing:
        for lane in _lanes():
            if now - lane.rested >= PAUSE:
                _clear(lane, wait=False)


def _watch() -> None:
    """Ends when there is nothing left to watch."""
    global _watcher
    while True:
        time.sleep(min(PAUSE / 2, LOOK))
        _clear_paused(time.monotonic())
        with _guard:
            if not _resting:
                _watcher = None
                return
