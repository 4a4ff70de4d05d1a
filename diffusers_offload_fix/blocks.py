"""Which modules make a group at block level.

Upstream looks for lists of blocks among a module's children only. Where they lie deeper (a text encoder's layers are three modules
down, an autoencoder's blocks are in its encoder and decoder) everything becomes one group, which saves nothing (G2). Here a child that
holds lists of blocks is taken apart in the same way: its blocks are groups, and what is left of it is a group that comes with its own
forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from .tree import Tree

LISTS = (torch.nn.ModuleList, torch.nn.Sequential)


@dataclass
class Plan:
    """How one module is cut into groups.

    Attributes:
        module: the module.
        name: its name inside the model, "" for the model itself.
        groups: runs of neighbouring blocks, each with a name.
        rest: children that come and go with the module's forward, as do its own parameters and buffers.
        parts: children that are taken apart like this one.
    """

    module: torch.nn.Module
    name: str
    groups: list[tuple[str, list[torch.nn.Module]]] = field(default_factory=list)
    rest: list[torch.nn.Module] = field(default_factory=list)
    parts: list[Plan] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """True for a part in which nothing was found to take apart."""
        return not self.groups and not self.parts

    def all_parts(self) -> Iterator[Plan]:
        """This plan's parts, theirs, and so on."""
        for part in self.parts:
            yield part
            yield from part.all_parts()


def plan(module: torch.nn.Module, size: int, named: Iterable[str] = (), name: str = "") -> Plan:
    """Cuts a model into groups of `size` blocks.

    Args:
        named: children that are to be taken apart in any case (upstream's `block_modules`).
        name: of the module inside its model.
    """
    made = Plan(module, name)
    prefix = f"{name}." if name else ""
    others = []
    for child_name, child in module.named_children():
        if child_name in named:
            made.parts.append(plan(child, size, named, prefix + child_name))
        elif isinstance(child, LISTS):
            made.groups += _runs(child, size, prefix + child_name)
        else:
            others.append((child_name, child))
    largest = max((_nbytes(*blocks) for _, blocks in made.groups), default=0)
    for child_name, child in others:
        if _is_worth_it(child, largest):
            made.parts.append(plan(child, size, named, prefix + child_name))
        else:
            made.rest.append(child)
    return made


def _runs(blocks: torch.nn.Module, size: int, name: str) -> Iterator[tuple[str, list[torch.nn.Module]]]:
    modules = list(blocks.children())
    for start in range(0, len(modules), size):
        run = modules[start : start + size]
        yield f"{name}_{start}_{start + len(run) - 1}", run


def _is_worth_it(module: torch.nn.Module, largest: int) -> bool:
    """True if the module has blocks, and is larger than the largest group that there is anyway."""
    return any(_has_blocks(part) for part in module.modules()) and _nbytes(module) > largest


def _has_blocks(module: torch.nn.Module) -> bool:
    return isinstance(module, LISTS) and sum(any(True for _ in child.parameters()) for child in module.children()) > 1


def _nbytes(*modules: torch.nn.Module) -> int:
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum(leaf.nbytes for tensor in tensors.values() for leaf in Tree(tensor).leaves)
