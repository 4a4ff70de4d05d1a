"""The hooks of group offloading: finding them, and taking them away without disturbing the others."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .chain import take_out
from .groups import HOOKS, group_hooks

#: How group offloading was applied last, by the module that it was applied to (`applying.Application`).
applications: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def hooks_below(root: torch.nn.Module) -> Iterator[Any]:
    """The group offloading hooks of a module and of everything below it."""
    for module in root.modules():
        hook = group_hooks(module)
        if hook is not None:
            yield hook


def unhook(root: torch.nn.Module) -> None:
    """Takes the hooks of group offloading off a module and everything below it; other hooks stay connected."""
    for module in root.modules():
        applications.pop(module, None)
        registry = module.__dict__.get("_diffusers_hook")
        if registry is None:
            continue
        for name in HOOKS:
            # Also where the plugin's own patch, which closes the chain, has been taken out.
            take_out(registry, name, functools.partial(registry.remove_hook, name, recurse=False))
        if not registry.hooks:
            _tidy(module)


def _tidy(module: torch.nn.Module) -> None:
    """Leaves no trace of hooks on a module that has none: its forward is its class's again."""
    del module.__dict__["_diffusers_hook"]
    forward = module.__dict__.get("forward")
    if isinstance(forward, types.MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward:
        del module.__dict__["forward"]
