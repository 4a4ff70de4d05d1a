"""Which tensors some modules have, and a cheap way to tell whether they still have the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from . import casting
from .tree import is_peculiar
from .watch import is_counted


class Structure:
    """The tensors of some modules, and a cheap way to tell whether the modules still have the same ones.

    Args:
        modules: modules whose parameters and buffers all belong to the group.
        loose: single tensors that belong to it.
        leader: the module under which the loose tensors hang; they are looked up by place, so that a replaced one is found.
    """

    def __init__(self, modules: list[torch.nn.Module], loose: list[Tensor], leader: torch.nn.Module) -> None:
        self._full: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._empty: list[dict[str, Any]] = []
        self._buffers: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._norms: list[_NormBase] = []
        self.owners: dict[int, torch.nn.Module] = {}
        for module in unique(part for root in modules for part in root.modules()):
            self._note(module)
        self._places = _places(loose, leader)
        self._loose = loose
        self._own: list[Tensor] = []
        if all(leader is not module for module in modules):
            self._note_own(leader)
        self.tensors: list[Tensor] = unique(self._collect(modules))
        self._untold = {id(t) for module in modules for t in module.buffers() if not is_counted(t)}

    def _note(self, module: torch.nn.Module) -> None:
        for table in (module._parameters, module._buffers, module._modules):
            if table:
                self._full.append((table, ids_of(table)))
            else:
                self._empty.append(table)
        if module._buffers:
            self._buffers.append((module._buffers, ids_of(module._buffers)))
        self.owners.update({id(p): module for p in module._parameters.values() if is_peculiar(p)})
        self._note_norm(module)
        registry = module.__dict__.get("_diffusers_hook")
        if registry is not None and "layerwise_casting" in registry.hooks:
            casting.attach(registry.hooks["layerwise_casting"])

    def _note_norm(self, module: torch.nn.Module) -> None:
        if isinstance(module, _NormBase):
            self._norms.append(module)

    def _note_own(self, leader: torch.nn.Module) -> None:
        self._note_norm(leader)
        # Upstream lists a loose tensor once, under the first module that has it; a module that shares it needs it too.
        for table in (leader._parameters, leader._buffers):
            self._full.append((table, ids_of(table)))
            if table is leader._buffers:
                self._buffers.append(self._full[-1])
            self._own += [value for value in table.values() if value is not None]

    def _collect(self, modules: list[torch.nn.Module]) -> Iterator[Tensor]:
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()
        yield from self._loose
        yield from self._own

    def loose_now(self) -> list[Tensor]:
        """The loose tensors as they hang in their modules now; one that was deleted is left out."""
        found = []
        for tensor in self._loose:
            table, name = self._places.get(id(tensor), ({}, ""))
            value = table.get(name) if name else tensor
            if isinstance(value, Tensor):
                found.append(value)
        return found

    def intact(self) -> bool:
        """True while no parameter, buffer or submodule was added, removed or replaced."""
        # Asked before every forward of every group: plain loops, which cost half of what generators do.
        for table in self._empty:
            if table:
                return False
        for table, ids in self._full:
            if ids_of(table) != ids:
                return False
        return not self._places or all(id(table.get(name)) == key for key, (table, name) in self._places.items())

    def replaced_buffers(self) -> list[Tensor]:
        """Buffers that were put in the place of others since the structure was read."""
        found = []
        for table, ids in self._buffers:
            for value, before in zip(table.values(), ids):
                if id(value) != before and value is not None:
                    found.append(value)
        return found

    def volatile(self) -> set[int]:
        """Ids of the buffers that a forward may change without their version telling: batch norm statistics in training (the
        kernel does not count them), and inference tensors (which have no version)."""
        if not self._norms:
            return self._untold
        training = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        return self._untold.union(id(buffer) for norm in training for buffer in norm.buffers())


def ids_of(table: dict[str, Any]) -> tuple[int, ...]:
    """The identities of a table's values, in order."""
    return tuple(map(id, table.values()))


def _places(loose: list[Tensor], leader: torch.nn.Module) -> dict[int, tuple[dict[str, Any], str]]:
    wanted = {id(tensor) for tensor in loose}
    places: dict[int, tuple[dict[str, Any], str]] = {}
    for module in leader.modules() if wanted else ():
        for table in (module._parameters, module._buffers):
            places.update({id(value): (table, name) for name, value in table.items() if id(value) in wanted})
    return places


def unique(items: Any) -> list[Any]:
    """The items, each object once, in order."""
    return list({id(item): item for item in items}.values())
