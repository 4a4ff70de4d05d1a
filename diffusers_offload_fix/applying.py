"""Applying group offloading to a module: all of it or nothing, and the last call counts.

Upstream adds hooks to those that are there: a second call is ignored or raises (G10), and one that raises half-way leaves a module
that is hooked in parts (G8). Here what was applied before is taken away first, and is put back if the new one cannot be applied.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import enabling, entries, members, mover
from .blocks import Plan, plan
from .groups import state_at, state_of
from .removal import holdings, is_hooked, restore, retire, take_off
from .unhook import applications

logger = logging.getLogger("diffusers_offload_fix")

Function = Callable[..., Any]


@dataclass(frozen=True)
class Application:
    """How group offloading was applied to a module: the function that did it, and what it was given beside the module."""

    apply: Function
    arguments: dict[str, Any]

    def to(self, module: torch.nn.Module) -> None:
        """Applies it to a module that has no hooks of group offloading; if it cannot be, the module stays ordinary."""
        before, _running.made = getattr(_running, "made", None), []
        try:
            with enabling.together(mover.settle):
                self.apply(module, **self.arguments)
            _watch_entries(module)
            members.lend(module)
            applications[module] = self
        except BaseException:
            _undo(module, _running.made)
            raise
        finally:
            _running.made = before


def _watch_entries(module: torch.nn.Module) -> None:
    state = state_at(module)
    if state is not None:
        entries.attach(state)


#: `made`: the groups that the application under way in this thread has made.
_running = threading.local()


def note(group: Any) -> None:
    """Notes a group that was made; if the application under way fails, it ends with it."""
    made = getattr(_running, "made", None)
    if made is not None:
        made.append(group)


def anew(module: torch.nn.Module, application: Application) -> None:
    """Applies group offloading to a module, in place of any that there is below it.

    If it cannot be applied, what was there before is put back; if that fails too, the module is an ordinary one on the host.
    """
    before = applied_below(module)
    # The tensors stay over their slabs, from which the new groups take them.
    take_off(module)
    try:
        application.to(module)
    except BaseException:
        put_back(before)
        raise


def applied_below(module: torch.nn.Module) -> list[tuple[torch.nn.Module, Application]]:
    """What is applied to a module and to the modules below it."""
    return [(part, applications[part]) for part in module.modules() if part in applications and is_hooked(part)]


def put_back(before: list[tuple[torch.nn.Module, Application]]) -> None:
    """Applies again what `applied_below` found; what cannot be applied leaves an ordinary module."""
    for part, application in before:
        try:
            application.to(part)
        except Exception as error:
            logger.warning("the group offloading of %s from before could not be put back: %s", type(part).__name__, error)


def _undo(module: torch.nn.Module, groups: list[Any]) -> None:
    """Makes a module ordinary again of which some groups were made before one failed."""
    held = [*holdings(groups), *take_off(module)]
    retire(groups)
    restore(held, torch.device("cpu"))


def replaced(target: Any, function: Function) -> Function:
    """Upstream's function for one level, with `function(module, **arguments)` doing the work."""
    signature = inspect.signature(function)

    def apply(*args: Any, **kwargs: Any) -> None:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        anew(arguments.pop("module"), Application(target, arguments))

    return apply


class Builder:
    """Makes groups and their hooks with upstream's classes, whichever release they are of.

    Args:
        upstream: the live module of upstream.
        arguments: what upstream's function for block level was given beside the module: a `config`, or single values.
    """

    def __init__(self, upstream: Any, arguments: dict[str, Any]) -> None:
        self._upstream = upstream
        self._config = arguments.get("config")
        self._values = dict(vars(self._config)) if self._config is not None else arguments
        self._group_parameters = inspect.signature(upstream.ModuleGroup.__init__).parameters

    def build(self, module: torch.nn.Module) -> None:
        """Applies group offloading at block level."""
        made = plan(module, self._size(), self._values.get("block_modules") or ())
        for part in [made, *made.all_parts()]:
            self._blocks(part)
        for part in reversed(list(made.all_parts())):
            self._part(part)
        self._root(made)

    def _size(self) -> int:
        size = int(self._values["num_blocks_per_group"])
        if self._values.get("stream") is not None and size != 1:
            self._upstream.logger.warning("With streams a group is one block: num_blocks_per_group=%d is taken as 1.", size)
            size = 1
        return size

    def _blocks(self, part: Plan) -> None:
        for name, blocks in part.groups:
            self._streamed(blocks, name)

    def _streamed(self, modules: list[torch.nn.Module], name: str) -> None:
        stream = self._values.get("stream")
        group = self._group(
            modules=modules,
            offload_leader=modules[-1],
            onload_leader=modules[0],
            non_blocking=self._values["non_blocking"],
            stream=stream,
            record_stream=self._values.get("record_stream"),
            onload_self=True,
            group_id=self._id(name),
        )
        for module in modules:
            self._hook(module, group)

    def _part(self, part: Plan) -> None:
        if part.is_whole:
            self._streamed([part.module], part.name)
            return
        own = [*part.module.parameters(recurse=False), *part.module.buffers(recurse=False)]
        if part.rest or own:
            self._rest(part, [part])

    def _root(self, made: Plan) -> None:
        # Upstream counts on a hook at the root, whatever it has: it tells where a forward begins and ends.
        self._rest(made, [made, *(part for part in made.all_parts() if not part.is_whole)])

    def _rest(self, part: Plan, owners: list[Plan]) -> None:
        """The group that comes with a module's forward. Tensors that hang in the parts themselves may be used by the root too."""
        group = self._group(
            modules=part.rest,
            offload_leader=part.module,
            onload_leader=part.module,
            parameters=[p for owner in owners for p in owner.module.parameters(recurse=False)],
            buffers=[b for owner in owners for b in owner.module.buffers(recurse=False)],
            non_blocking=False,
            stream=None,
            record_stream=False,
            onload_self=True,
            group_id=self._id(f"{part.name}.rest" if part.name else "rest"),
        )
        if part.name:
            self._hook(part.module, group)
        else:
            self._hook_root(part.module, group)
        state = state_of(group)
        if state is not None:
            members.attach(state)

    def _group(self, **values: Any) -> Any:
        shared = ("offload_device", "onload_device", "low_cpu_mem_usage", "offload_to_disk_path")
        values.update({name: self._values.get(name) for name in shared})
        return self._upstream.ModuleGroup(**{name: value for name, value in values.items() if name in self._group_parameters})

    def _id(self, name: str) -> str:
        return f"{self._values.get('module_prefix') or ''}{name}"

    def _hook(self, module: torch.nn.Module, group: Any) -> None:
        self._register(self._upstream._apply_group_offloading_hook, module, group)

    def _hook_root(self, module: torch.nn.Module, group: Any) -> None:
        streamed = self._values.get("stream") is not None
        names = {True: "_apply_lazy_group_offloading_hook", False: "_apply_group_offloading_hook"}
        self._register(getattr(self._upstream, names[streamed]), module, group)

    def _register(self, function: Function, module: torch.nn.Module, group: Any) -> None:
        if self._config is None:
            function(module, group)
        else:
            function(module, group, config=self._config)
