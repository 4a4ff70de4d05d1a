"""Modules of a group that are run by themselves.

The group of a root module holds what no block holds, and comes to the device with the root's forward. Autoencoders are run by
`encode` and `decode`, language models look up their embeddings before they run the stack that has them, and pipelines apply a final
norm by themselves: none of these goes through that forward (G1). So every module of such a group brings the group when it is run
while the group is away, and lets go of it when it is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from . import mover
from .borrowed import lent
from .groups import GroupState, group_hooks, state_at
from .inputs import send

_begin = torch.compiler.disable(mover.begin)  # type: ignore[no-untyped-call]
_end = torch.compiler.disable(mover.release)  # type: ignore[no-untyped-call]


class Member:
    """The two hooks of one module; the first one that finds the group away is the one that takes it away again."""

    def __init__(self, state: GroupState | None = None) -> None:
        self._state: Any = _nobody if state is None else weakref.ref(state)
        self._entered = False

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Brings the group. A whole model that is compiled has gone through its root, where the group came."""
        if torch.compiler.is_compiling():
            return None
        state = self._state()
        if state is None or state.active or not is_attached(state):
            return None
        args, kwargs = send(args, state), send(kwargs, state)
        _begin(state, (args, kwargs))
        self._entered = state.held = True
        return args, kwargs

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Takes the group away if this module brought it, also when its forward raises."""
        if torch.compiler.is_compiling() or not self._entered:
            return
        self._entered = False
        state = self._state()
        if state is not None:
            state.held = False
            _end(state, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        # A copied model has no hooks of group offloading.
        return Member()


def _nobody() -> None:
    """A weak reference to no group."""


def attach(state: GroupState) -> None:
    """Watches the modules of a group."""
    for module in watched(state):
        watch(state, module)


def watch(state: GroupState, module: torch.nn.Module) -> None:
    """Has a module bring the group when it runs, and take it away if it was not there before."""
    member = Member(state)
    state.handles.append(module.register_forward_pre_hook(member.before, prepend=True, with_kwargs=True))
    state.handles.append(module.register_forward_hook(member.after, always_call=True))


def lend(root: torch.nn.Module) -> None:
    """Has the groups of modules whose tensors a parent reads by itself come with that parent."""
    for module in root.modules():
        for below in lent(module):
            state = state_at(below)
            if state is not None and state.leader is below and not state.handles:
                watch(state, module)


def watched(state: GroupState) -> list[torch.nn.Module]:
    """The outermost modules of a group that have a forward, and all below them that have tensors of their own."""
    tops = [module for root in state.modules for module in _callable(root)]
    found = {id(module): module for module in tops}
    for top in tops:
        found.update({id(m): m for m in top.modules() if m._parameters or m._buffers})
    return [module for module in found.values() if group_hooks(module) is None]


def _callable(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        for child in module.children():
            yield from _callable(child)
    else:
        yield module


def is_attached(state: GroupState) -> bool:
    """False once the group's hook is gone, by whichever way."""
    if state_at(state.leader) is state:
        return True
    state.detach()
    return False
