"""Homes in files are made together, when all groups of a model are known: one file, written once from end to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from . import disk
from .groups import GroupState


class _Present(threading.local):
    """What is being enabled by this thread."""

    states: list[GroupState] | None = None
    folders: frozenset[str] = frozenset()


_present = _Present()


def takes(state: GroupState) -> bool:
    """True if the group's home is made together with others, when all of them are known."""
    if _present.states is None or state.folder is None:
        return False
    _present.states.append(state)
    return True


def check(folder: str) -> None:
    """Sees, before anything is moved, whether a folder is good for files.

    Raises:
        DiskError: it is not.
    """
    if folder not in _present.folders:
        disk.prepare(folder)
        if _present.states is not None:
            _present.folders |= {folder}


@contextlib.contextmanager
def together(settle: Callable[[list[GroupState]], None]) -> Iterator[None]:
    """Makes the homes of the groups that are enabled in the body at its end, all at once."""
    if _present.states is not None:
        yield
        return
    states: list[GroupState] = []
    _present.states = states
    try:
        yield
        _present.states = None
        settle(states)
    finally:
        _present.states, _present.folders = None, frozenset()
