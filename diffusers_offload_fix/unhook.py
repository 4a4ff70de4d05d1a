"""The hooks of group offloading: finding them, and taking them away without disturbing the others.

Upstream's `HookRegistry.remove_hook` leaves the chain of forwards open behind a hook where another one above has a `new_forward` of
its own (RC8), so that a cache is disconnected without a word. Here the chain is closed whichever hooks there are.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

#: Upstream's names of the hooks that belong to group offloading; the first one has the group.
GROUP = "group_offloading"
NAMES = (GROUP, "lazy_prefetch_group_offloading", "layer_execution_tracker")

#: How group offloading was applied last, by the module that it was applied to (`applying.Application`).
applications: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def hook_of(module: torch.nn.Module) -> Any:
    """The group offloading hook of one module, or None."""
    registry = module.__dict__.get("_diffusers_hook")
    return None if registry is None else registry.hooks.get(GROUP)


def hooks_below(root: torch.nn.Module) -> Iterator[Any]:
    """The group offloading hooks of a module and of everything below it."""
    for module in root.modules():
        hook = hook_of(module)
        if hook is not None:
            yield hook


def unhook(root: torch.nn.Module) -> None:
    """Takes the hooks of group offloading off a module and everything below it; other hooks stay connected."""
    for module in root.modules():
        applications.pop(module, None)
        registry = module.__dict__.get("_diffusers_hook")
        if registry is None:
            continue
        for name in NAMES:
            _remove(registry, name, module)
        if not registry.hooks:
            _tidy(module)


def _remove(registry: Any, name: str, module: torch.nn.Module) -> None:
    hook = registry.hooks.get(name)
    if hook is None:
        return
    index = registry._hook_order.index(name)
    below = _below(hook)
    above = registry._fn_refs[index + 1] if index + 1 < len(registry._fn_refs) else None
    own = None if above is None or above.original_forward is None else above.forward
    owner = None if above is None else registry.hooks[registry._hook_order[index + 1]]
    registry.remove_hook(name, recurse=False)
    if above is None:
        module.forward = below
    elif own is None:
        above.forward = below
    else:
        above.original_forward = below
        above.forward = own if _is_of(own, owner) else _own_forward(owner, module)


def _below(hook: Any) -> Any:
    """The forward under a hook. After another hook was removed, upstream's `original_forward` may be out of date."""
    link = hook.fn_ref
    if link.original_forward is not None and _is_of(link.forward, hook):
        return link.original_forward
    return link.forward


def _own_forward(hook: Any, module: torch.nn.Module) -> Any:
    return functools.update_wrapper(functools.partial(hook.new_forward, module), hook.new_forward)


def _is_of(forward: Any, hook: Any) -> bool:
    return isinstance(forward, functools.partial) and getattr(forward.func, "__self__", None) is hook


def _tidy(module: torch.nn.Module) -> None:
    """Leaves no trace of hooks on a module that has none: its forward is its class's again."""
    del module.__dict__["_diffusers_hook"]
    forward = module.__dict__.get("forward")
    if isinstance(forward, types.MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward:
        del module.__dict__["forward"]
