"""The chain of forwards that diffusers' hooks make of a module: taking a hook out of it, and where group offloading sits in it.

Every hook of a module has a link to what is below it: `original_forward` for a hook with a `new_forward` of its own, else `forward`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from . import casting
from .groups import ATTRIBUTE, HOOK, HOOKS

Function = Callable[..., Any]

_LAYERWISE_CASTING = "layerwise_casting"


def remove_hook(original: Function) -> Function:
    """Replaces `HookRegistry.remove_hook`, which leaves the chain open above the removed hook (RC8)."""

    def remove_hook(self: Any, name: str, recurse: bool = True) -> None:
        """Takes a hook out of the module's chain, and with `recurse` out of its submodules' chains."""
        take_out(self, name, lambda: original(self, name, recurse))

    return remove_hook


def take_out(registry: Any, name: str, remove: Callable[[], None]) -> None:
    """Takes a hook out by `remove`, upstream's own way, and closes the chain of forwards where it was."""
    if name not in registry.hooks:
        remove()
        return
    index = registry._hook_order.index(name)
    below = _below(registry.hooks[name])
    above = registry._fn_refs[index + 1] if index + 1 < len(registry._fn_refs) else None
    if above is None:
        remove()
        registry._module_ref.forward = below
        return
    # Upstream writes the new link over `forward`; a hook with a forward of its own looks for it in `original_forward`.
    owner, own, has_own = registry.hooks[registry._hook_order[index + 1]], above.forward, above.original_forward is not None
    remove()
    _set_link(above, below)
    if has_own:
        above.forward = own if _is_of(own, owner) else _own_forward(owner, registry._module_ref)


def _below(hook: Any) -> Any:
    """The forward under a hook. Where upstream itself has removed another, `original_forward` may be out of date."""
    link = hook.fn_ref
    if link.original_forward is not None and _is_of(link.forward, hook):
        return link.original_forward
    return link.forward


def _own_forward(hook: Any, module: torch.nn.Module) -> Any:
    return functools.update_wrapper(functools.partial(hook.new_forward, module), hook.new_forward)


def _is_of(forward: Any, hook: Any) -> bool:
    return isinstance(forward, functools.partial) and getattr(forward.func, "__self__", None) is hook


def _link(reference: Any) -> Any:
    return reference.forward if reference.original_forward is None else reference.original_forward


def register_hook(original: Function) -> Function:
    """Replaces `HookRegistry.register_hook`, so that the order in which things are enabled does not matter.

    Group offloading goes below hooks that may skip the module (G4: a skipped block is not loaded) and above casting (G14: the small
    dtype is what travels).
    """

    def register_hook(self: Any, hook: Any, name: str) -> None:
        """Adds a hook to the module's chain: on top, but for group offloading's and casting's places."""
        original(self, hook, name)
        below = _place_of(self, name)
        if below is not None:
            _sink(self, below)
        if name == _LAYERWISE_CASTING:
            casting.attach(hook)

    return register_hook


def _place_of(registry: Any, name: str) -> int | None:
    """The index of the hook under which the one on top has to go, or None if it is in its place."""
    order = registry._hook_order
    if HOOK not in order or not hasattr(registry.hooks[HOOK].group, ATTRIBUTE):
        return None
    if name == HOOK:
        skipping = (index for index, other in enumerate(order[:-1]) if _may_skip(registry.hooks[other], other))
        return next(skipping, None)
    if name == _LAYERWISE_CASTING:
        return int(order.index(HOOK))
    return None


def _may_skip(hook: Any, name: str) -> bool:
    return name not in HOOKS and hasattr(hook, "new_forward")


def _sink(registry: Any, index: int) -> None:
    """Moves the hook on top below the one at `index`."""
    module, references = registry._module_ref, registry._fn_refs
    top, upper = references[-1], references[index]
    outer, bottom = module.forward, _link(upper)
    module.forward = _link(top)
    _set_link(top, bottom)
    _set_link(upper, outer)
    for items in (registry._hook_order, references):
        items.insert(index, items.pop())


def _set_link(reference: Any, below: Any) -> None:
    if reference.original_forward is None:
        reference.forward = below
    else:
        reference.original_forward = below


def deepcopy(registry: Any, memo: dict[int, Any]) -> Any:
    """Copies a registry of a module that is being copied: with hooks that call the copy, and without group offloading.

    Upstream copies hooks but not the closures that call them: the copy would run the original's weights.
    """
    module = registry._module_ref
    twin = memo.get(id(module))
    if twin is None:
        return _plain_deepcopy(registry, memo)
    forward = module.__dict__.get("forward")
    copied = type(registry)(twin)
    memo[id(registry)] = copied
    for name in registry._hook_order:
        if name not in HOOKS:
            _copy_hook(copied, registry.hooks[name], name, memo)
    if forward is not None:
        memo[id(forward)] = twin.__dict__.get("forward") or types.MethodType(type(module).forward, twin)
        memo.setdefault(id(memo), []).append(forward)
    return copied


def _copy_hook(registry: Any, hook: Any, name: str, memo: dict[int, Any]) -> None:
    memo[id(hook.fn_ref)] = None
    twin = copy.deepcopy(hook, memo)
    casting.detach(twin)
    # It is initialised already, and its module is not there yet.
    twin.initialize_hook = _as_it_is
    registry.register_hook(twin, name)
    del twin.initialize_hook


def _as_it_is(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _plain_deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` does for a class without a method of its own."""
    twin = object.__new__(type(value))
    memo[id(value)] = twin
    attributes = {name: item for name, item in value.__dict__.items() if name != "__deepcopy__"}
    twin.__dict__.update(copy.deepcopy(attributes, memo))
    return twin


def copying(original: Function | None) -> Function:
    """Adds `HookRegistry.__deepcopy__`: also modules without a group may have hooks that have to call the copy."""

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """A registry for the copy of the module."""
        return deepcopy(self, memo)

    return __deepcopy__


def attach_deepcopy(registry: Any) -> None:
    """Makes a copy of the registry's module an ordinary one."""
    registry.__dict__["__deepcopy__"] = types.MethodType(deepcopy, registry)


def detach_deepcopy(registry: Any) -> None:
    """Undoes `attach_deepcopy`."""
    registry.__dict__.pop("__deepcopy__", None)
