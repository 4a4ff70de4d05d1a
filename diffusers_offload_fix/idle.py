"""Device memory that is kept between the forwards of a loop, and who gives it back.

A denoising loop calls one model again and again. Between two calls its lane keeps the device slots and has the first groups of the
next call copied ahead. They are given back as soon as another group-offloaded model runs on the device, or when the loop has
paused for `PAUSE` seconds.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .lane import Lane

#: Seconds between two forwards above which they do not belong to one loop.
PAUSE = 0.5

_guard = threading.Lock()
_resting: weakref.WeakSet[Lane] = weakref.WeakSet()
_watcher: threading.Thread | None = None


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
    if _resting:
        for lane in _lanes():
            if lane is not coming and lane.device == coming.device:
                _clear(lane, wait=False)


def clear(device: torch.device | None = None) -> None:
    """Gives back at once what lanes keep between forwards, on one device or on all."""
    for lane in _lanes():
        if device is None or lane.device == device:
            _clear(lane, wait=True)


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
    for lane in _lanes():
        if now - lane.rested >= PAUSE:
            _clear(lane, wait=False)


def _watch() -> None:
    """Ends when there is nothing left to watch."""
    global _watcher
    while True:
        time.sleep(PAUSE / 2)
        _clear_paused(time.monotonic())
        with _guard:
            if not _resting:
                _watcher = None
                return
