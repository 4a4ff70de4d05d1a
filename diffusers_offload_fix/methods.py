"""The replacements of diffusers' methods: thin, and the same on every release.

Only what exists in every release is touched. A group that the plugin does not move (it was made before the plugin was active) goes
through the original methods, and so does everything else about it.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _startup, applying, borrowed, chain, enabling, mover, newcomers
from .groups import ATTRIBUTE, GroupState, group_hooks, state_of
from .inputs import send
from .patcher import Patch

Function = Callable[..., Any]

#: Groups that the plugin moves; they keep working when it is deactivated.
_live: weakref.WeakSet[Any] = weakref.WeakSet()

# Moving weights is not for the compiler. Functions rather than wrapt proxies: a proxy that dynamo traces costs a graph break.
_enter = torch.compiler.disable(mover.enter)  # type: ignore[no-untyped-call]
_begin = torch.compiler.disable(mover.begin)  # type: ignore[no-untyped-call]
_leave = torch.compiler.disable(mover.leave)  # type: ignore[no-untyped-call]
_abandon = torch.compiler.disable(mover.abandon)  # type: ignore[no-untyped-call]
_explain = torch.compiler.disable(borrowed.explain)  # type: ignore[no-untyped-call]
_park = torch.compiler.disable(mover.park)  # type: ignore[no-untyped-call]


def _init(wrapped: Function, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wrapped(*args, **kwargs)
    state = GroupState(instance)
    if state.folder is not None and not state.passive:
        enabling.check(state.folder)
    setattr(instance, ATTRIBUTE, state)
    _live.add(instance)
    applying.note(instance)


def _init_cpu_param_dict(wrapped: Function, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Upstream's host copies: the mover has its own, so that nothing is held twice (R1).
    return {}


def _onload_(original: Function) -> Function:
    def onload_(self: Any) -> Any:
        """Brings the group to its onload device, ready for the current stream."""
        state = state_of(self)
        if state is None:
            return original(self)
        return _enter(state)

    return onload_


def _offload_(original: Function) -> Function:
    def offload_(self: Any) -> Any:
        """Takes the group to its offload device."""
        state = state_of(self)
        if state is None:
            return original(self)
        return _park(state)

    return offload_


def _pre_forward(original: Function) -> Function:
    def pre_forward(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Onloads the group of `module` and sends the inputs to its device."""
        state = state_of(self.group)
        if state is None:
            return original(self, module, *args, **kwargs)
        # Inputs first: if they do not fit on the device, the group is not left there.
        if not hasattr(self, newcomers.QUIET):
            args, kwargs = send(args, state), send(kwargs, state, _excluded(self))
        _begin(state, (args, kwargs))
        return args, kwargs

    return pre_forward


def _excluded(hook: Any) -> Any:
    return getattr(getattr(hook, "config", None), "exclude_kwargs", None) or ()


def _new_forward(original: Function | None) -> Function:
    def new_forward(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; if it raises, its group leaves the device as after any forward."""
        try:
            return self.fn_ref.original_forward(*args, **kwargs)
        except BaseException as error:
            state = state_of(self.group)
            if state is not None:
                _explain(error, module, state.device)
                _abandon(state)
            raise

    return new_forward


def _post_forward(original: Function) -> Function:
    def post_forward(self: Any, module: torch.nn.Module, output: Any) -> Any:
        """Offloads the group if `module` was the last of it."""
        state = state_of(self.group)
        if state is None:
            return original(self, module, output)
        _leave(state, module, output)
        return output

    return post_forward


def _deinitalize_hook(original: Function) -> Function:
    # The name is upstream's.
    def deinitalize_hook(self: Any, module: torch.nn.Module) -> Any:
        """Lets go of the group when its hook is removed."""
        state = state_of(self.group)
        if state is not None:
            mover.retire(state)
        registry = module.__dict__.get("_diffusers_hook")
        if registry is not None:
            chain.detach_deepcopy(registry)
        return original(self, module)

    return deinitalize_hook


def _lazy_initialize_hook(original: Function) -> Function:
    def initialize_hook(self: Any, module: torch.nn.Module) -> Any:
        """Does nothing where the plugin moves the groups: it learns their order itself (G22, G23)."""
        hook = group_hooks(module)
        if hook is None or state_of(hook.group) is None:
            return original(self, module)
        setattr(self, ATTRIBUTE, True)
        return module

    return initialize_hook


def _lazy_post_forward(original: Function) -> Function:
    def post_forward(self: Any, module: torch.nn.Module, output: Any) -> Any:
        """Does nothing where the plugin moves the groups."""
        return output if getattr(self, ATTRIBUTE, False) else original(self, module, output)

    return post_forward


def _initialize_hook(original: Function) -> Function:
    def initialize_hook(self: Any, module: torch.nn.Module) -> Any:
        """Offloads the group, as upstream does, and sees to it that a copy of the module is an ordinary one."""
        registry = module.__dict__.get("_diffusers_hook")
        if registry is not None and state_of(self.group) is not None:
            chain.attach_deepcopy(registry)
        return original(self, module)

    return initialize_hook


def _block_level(original: Function) -> Function:
    def apply(module: torch.nn.Module, **arguments: Any) -> None:
        applying.Builder(sys.modules[_startup.TARGET], arguments).build(module)
        newcomers.watch(module, newcomers.BlockRoot)

    return applying.replaced(apply, original)


def _leaf_level(original: Function) -> Function:
    def apply(module: torch.nn.Module, **arguments: Any) -> None:
        original(module, **arguments)
        newcomers.watch(module, newcomers.LeafRoot, newcomers.layers(original))

    return applying.replaced(apply, original)


def release() -> None:
    """Makes live groups independent of the class patches, so that they keep working once these are gone."""
    for group in list(_live):
        for name, make in (("onload_", _onload_), ("offload_", _offload_)):
            group.__dict__[name] = types.MethodType(make(getattr(type(group), name)), group)


#: Everything that is put into `diffusers.hooks.group_offloading`.
PATCHES: tuple[Patch, ...] = (
    Patch("ModuleGroup.__init__", "mover", "wrap", _init, ("modules", "offload_device", "onload_device", "stream")),
    Patch("ModuleGroup._init_cpu_param_dict", "mover", "wrap", _init_cpu_param_dict, ("self",)),
    Patch("ModuleGroup.onload_", "mover", "replace", _onload_, ("self",)),
    Patch("ModuleGroup.offload_", "mover", "replace", _offload_, ("self",)),
    Patch("GroupOffloadingHook.pre_forward", "mover", "replace", _pre_forward, ("self", "module", "args", "kwargs")),
    Patch("GroupOffloadingHook.post_forward", "mover", "replace", _post_forward, ("self", "module", "output")),
    Patch("GroupOffloadingHook.new_forward", "mover", "add", _new_forward),
    Patch("GroupOffloadingHook.deinitalize_hook", "mover", "add", _deinitalize_hook, ("self", "module")),
    Patch("GroupOffloadingHook.initialize_hook", "mover", "replace", _initialize_hook, ("self", "module")),
    Patch("LazyPrefetchGroupOffloadingHook.initialize_hook", "mover", "replace", _lazy_initialize_hook, ("self", "module")),
    Patch("LazyPrefetchGroupOffloadingHook.post_forward", "mover", "replace", _lazy_post_forward, ("self", "module", "output")),
    Patch("_apply_group_offloading_block_level", "mover", "replace", _block_level, ("module",)),
    Patch("_apply_group_offloading_leaf_level", "mover", "replace", _leaf_level, ("module",)),
    Patch("HookRegistry.remove_hook", "mover", "replace", chain.remove_hook, ("self", "name", "recurse")),
    Patch("HookRegistry.register_hook", "mover", "replace", chain.register_hook, ("self", "hook", "name")),
    Patch("HookRegistry.__deepcopy__", "mover", "add", chain.copying),
)
