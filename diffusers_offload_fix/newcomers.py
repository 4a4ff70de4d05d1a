"""Modules that come under an offloaded model after it was enabled, and get groups as if they had been there (G7).

An adapter is injected, projections are fused, a block is replaced: upstream has hooks for none of these modules, and their weights stay
on the host. The root of every offloaded model looks at what hangs under it before each forward, and covers what nobody covers.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .groups import HOOK, GroupState, group_hooks, state_at, state_of
from .structure import ids_of, unique

Function = Callable[..., Any]

#: Marks a hook that is there to look for newcomers only: upstream has none in its place, so it leaves the inputs alone.
QUIET = "_offload_fix_quiet"
#: Arguments of `ModuleGroup` in which new groups are as the old ones.
_OPTIONS = ("offload_device", "onload_device", "non_blocking", "stream", "record_stream", "low_cpu_mem_usage", "offload_to_disk_path")

_numbers = itertools.count(1)


def layers(function: Any) -> tuple[type, ...]:
    """The kinds of modules that upstream gives a group at leaf level.

    Args:
        function: upstream's own function for that level.
    """
    # Upstream's list of leaves has another name in older releases.
    names = inspect.unwrap(function).__globals__
    found: tuple[type, ...] = names.get("_GO_LC_SUPPORTED_PYTORCH_LAYERS") or names["_SUPPORTED_PYTORCH_LAYERS"]
    return found


def watch(module: torch.nn.Module, kind: type[Root], *args: Any) -> None:
    """Makes the hook of an offloaded model look for newcomers before each forward; gives the model a hook if it has none."""
    hooks = [hook for hook in map(group_hooks, module.modules()) if hook is not None and state_of(hook.group) is not None]
    if not hooks:
        return
    sample = next((hook for hook in hooks if hook.group.stream is not None), hooks[-1])
    root = kind(module, sample, *args)
    if group_hooks(module) is None:
        hook = root.cover(module, [], stream=None, non_blocking=False, record_stream=False)
        setattr(hook, QUIET, True)
    state = state_of(group_hooks(module).group)
    if state is not None:
        root.state = state
        state.root = root
        root.look()


class Root:
    """An offloaded model, and what has to stay as it is under it while nobody has come.

    Args:
        module: the model.
        sample: a hook whose group's options new groups get.
    """

    state: GroupState

    def __init__(self, module: torch.nn.Module, sample: Any) -> None:
        self.module = module
        self._hook = copy.copy(sample)
        self._hook.group = self._hook.fn_ref = None
        self._make = type(sample.group)
        known = inspect.signature(self._make.__init__).parameters
        self._options = {name: getattr(sample.group, name) for name in _OPTIONS if name in known}
        self._named = "group_id" in known
        self._full: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._empty: list[dict[str, Any]] = []
        #: What had no group when offloading was enabled has none on purpose.
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._first = True

    def refresh(self) -> None:
        """Covers what has come since the last look."""
        if any(self._empty) or any(ids_of(table) != ids for table, ids in self._full):
            self.look()

    def look(self) -> None:
        """Covers every module that has come and that nobody covers, and notes what is there now."""
        self._full, self._empty = [], []
        self._walk_all()
        self._first = False

    def _walk_all(self) -> None:
        raise NotImplementedError

    def _is_newcomer(self, module: torch.nn.Module) -> bool:
        """True for a module without a group that was not there when offloading was enabled."""
        if group_hooks(module) is not None or module in self._known:
            return False
        if self._first:
            self._known.add(module)
        return not self._first

    def cover(self, module: torch.nn.Module, modules: list[torch.nn.Module], **options: Any) -> Any:
        """Gives `module` a hook with a group of its own, which holds `modules` and the module's own tensors."""
        if self._named:
            options["group_id"] = f"newcomer_{next(_numbers)}"
        group = self._make(modules=modules, offload_leader=module, onload_leader=module, **{**self._options, **options})
        hook = copy.copy(self._hook)
        hook.group = group
        registry = _registry(module, self.module)
        registry.register_hook(hook, HOOK)
        return hook

    def _note(self, *tables: dict[str, Any]) -> None:
        for table in tables:
            if table:
                self._full.append((table, ids_of(table)))
            else:
                self._empty.append(table)


class BlockRoot(Root):
    """A model whose blocks have groups, and which itself has one for everything else."""

    def _walk_all(self) -> None:
        self._note(self.module._modules)
        blocks = []
        for child in unique(self.module.children()):
            if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
                self._note(child._modules)
                blocks += [block for block in child if block is not None]
            elif self._is_newcomer(child):
                self._known.add(child)
                self.state.modules.append(child)
                self.state.forget_structure()
        for block in unique(blocks):
            if self._is_newcomer(block):
                self.cover(block, [block])
        if not self._first:
            present = ids(self.module.modules())
            for state in unique([self.state, *(state for state in map(state_at, blocks) if state is not None)]):
                self._part_with_lost(state, present)

    @staticmethod
    def _part_with_lost(state: GroupState, present: set[int]) -> None:
        """A group of several modules goes on without those that were taken out of the model."""
        left = [module for module in state.modules if id(module) in present]
        if len(left) != len(state.modules):
            state.modules = left
            state.leader = state.leader if id(state.leader) in present or not left else left[-1]
            state.forget_structure()


class LeafRoot(Root):
    """A model each of whose layers has a group, and so has each module with tensors of its own."""

    def __init__(self, module: torch.nn.Module, sample: Any, layers: tuple[type, ...]) -> None:
        super().__init__(module, sample)
        self._layers = layers

    def _walk_all(self) -> None:
        seen: set[int] = set()
        for child in self.module.children():
            self._walk(child, seen)
        self._note(self.module._modules)

    def _walk(self, module: torch.nn.Module, seen: set[int]) -> None:
        state = state_at(module)
        if id(module) in seen or (state is not None and (state.root is not None or any(module is own for own in state.modules))):
            return
        seen.add(id(module))
        is_layer = isinstance(module, self._layers)
        if (is_layer or any(True for _ in _own_tensors(module))) and self._is_newcomer(module):
            self.cover(module, [module] if is_layer else [])
            if is_layer:
                return
            state = state_at(module)
        self._note(module._modules)
        if state is None:
            self._note(module._parameters, module._buffers)
        for child in module.children():
            self._walk(child, seen)


def ids(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The identities of some modules."""
    return set(map(id, modules))


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _registry(module: torch.nn.Module, offloaded: torch.nn.Module) -> Any:
    registry = module.__dict__.get("_diffusers_hook")
    if registry is not None:
        return registry
    # Of the class that upstream uses, wherever that is in this release.
    kind = next(type(found) for found in (part.__dict__.get("_diffusers_hook") for part in offloaded.modules()) if found is not None)
    return kind.check_if_exists_or_initialize(module)
