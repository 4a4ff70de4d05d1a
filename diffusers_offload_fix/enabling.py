"""Enabling as a whole: it succeeds for all groups of a model, or the model is as it was.

Upstream makes and hooks one group after another. When one of them fails, the ones before it stay hooked, and the model is neither
offloaded nor ordinary. And homes in files are better made together: one file, written once from end to end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import disk
from .groups import GroupState

#: The hooks of group offloading, the outermost first.
_NAMES = ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading")


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
def whole(module: torch.nn.Module, settle: Callable[[list[GroupState]], None]) -> Iterator[None]:
    """Enables group offloading of `module` in its body, and then makes the homes that were put off; undoes it all on an error."""
    if _present.states is not None:
        yield
        return
    before = {id(hook) for _, _, hook in _hooks(module)}
    states: list[GroupState] = []
    _present.states = states
    try:
        yield
        _present.states = None
        settle(states)
    except BaseException:
        _present.states = None
        for registry, name, hook in list(_hooks(module)):
            if id(hook) not in before:
                registry.remove_hook(name, recurse=False)
        raise
    finally:
        _present.states, _present.folders = None, frozenset()


def _hooks(module: torch.nn.Module) -> Iterator[tuple[Any, str, Any]]:
    for part in module.modules():
        registry: Any = part.__dict__.get("_diffusers_hook")
        for name in _NAMES if registry is not None else ():
            if name in registry.hooks:
                yield registry, name, registry.hooks[name]
