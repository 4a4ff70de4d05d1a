"""Methods that stand in for a model's forward.

An autoencoder is run by `encode` and `decode`. Hooks are on `forward` only, so such a method comes here first: the root's group is on
the device while it runs, what the order of groups is learnt by begins and ends with it, and nothing is copied ahead of time for a
forward that does not come.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch

from . import mover
from .groups import GroupState
from .inputs import send
from .members import is_attached

#: The methods that do so in every autoencoder of diffusers.
NAMES = ("encode", "decode")

_begin = torch.compiler.disable(mover.begin)  # type: ignore[no-untyped-call]
_end = torch.compiler.disable(mover.release)  # type: ignore[no-untyped-call]
_abandon = torch.compiler.disable(mover.abandon)  # type: ignore[no-untyped-call]


class Entry:
    """One method of one model, in the place of the bound method."""

    def __init__(self, module: torch.nn.Module, name: str, state: GroupState) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._state = weakref.ref(state)
        functools.update_wrapper(self, getattr(type(module), name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, state = self._module(), self._state()
        method = getattr(type(module), self._name)
        if state is None or state.active or not is_attached(state):
            return method(module, *args, **kwargs)
        args, kwargs = send(args, state), send(kwargs, state)
        _begin(state, (args, kwargs))
        try:
            output = method(module, *args, **kwargs)
        except BaseException:
            _abandon(state)
            raise
        _end(state, output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied model has no hooks of group offloading.
        twin = memo.get(id(self._module()))
        if twin is None:
            return self
        return types.MethodType(getattr(type(twin), self._name), twin)

    def remove(self) -> None:
        """Gives the module its own method back."""
        module = self._module()
        if module is not None and module.__dict__.get(self._name) is self:
            del module.__dict__[self._name]


def attach(state: GroupState) -> None:
    """Puts itself before the methods of the group's leader that stand in for its forward."""
    module = state.leader
    for name in NAMES:
        if callable(getattr(type(module), name, None)) and name not in module.__dict__:
            entry = Entry(module, name, state)
            module.__dict__[name] = entry
            state.handles.append(entry)
