"""The way out: a group-offloaded model becomes an ordinary one again.

Without it nothing takes group offloading off: `.to()` is refused, so is `enable_model_cpu_offload`, and the weights stay pinned (G13).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import backend, mover
from .groups import quiet, state_of
from .layout import Layout
from .structure import unique
from .swapping import inference_alias, set_leaves
from .tree import Tree, is_peculiar
from .unhook import hooks_below, unhook
from .unit import Entry, Unit, make_binding
from .watch import is_counted


class OffloadedModuleBusy(RuntimeError):
    """Group offloading cannot be taken off a module while its forward runs. The message names the module's class."""


def disable_group_offload(module_or_pipeline: Any, device: torch.device | str = "cpu") -> None:
    """Takes group offloading off a module, or off every component of a pipeline, and leaves ordinary weights on `device`.

    The weights keep their identity and are bit for bit what they were, in ordinary memory: what was pinned is given back, one group
    after another, and so are device memory and files. Other hooks (caches, layerwise casting, adapters) stay connected. Afterwards
    `.to()`, `enable_model_cpu_offload()`, `save_pretrained()` and enabling group offloading again work as on any model.

    A module that is not group-offloaded is left as it is, and so is such a component: calling this twice, or for two pipelines that
    share a component, does no harm.

    Args:
        module_or_pipeline: an `nn.Module`, or anything with a dictionary of `components`.
        device: where the weights are to be, the CPU unless said otherwise.

    Raises:
        TypeError: neither a module nor a pipeline was given.
        OffloadedModuleBusy: a forward of the module runs at this moment; nothing has changed.

    Source: G13 of the field reports, huggingface/diffusers#10452.
    """
    device = backend.resolve(device)
    roots = [root for root in modules_of(module_or_pipeline) if is_hooked(root)]
    _refuse_running(hook.group for root in roots for hook in hooks_below(root))
    for root in roots:
        restore(take_off(root), device)
    with quiet():
        for root in roots:
            _bring(root, device)


def modules_of(module_or_pipeline: Any) -> list[torch.nn.Module]:
    """The module itself, or the modules among a pipeline's components, each once."""
    if isinstance(module_or_pipeline, torch.nn.Module):
        return [module_or_pipeline]
    components = getattr(module_or_pipeline, "components", None)
    if not isinstance(components, dict):
        raise TypeError(
            f"A torch.nn.Module or a pipeline with components is needed, and {type(module_or_pipeline).__name__} is neither. "
            "Pass the pipeline, or one of its models."
        )
    return unique(value for value in components.values() if isinstance(value, torch.nn.Module))


def is_hooked(root: torch.nn.Module) -> bool:
    """True if the module or anything below it is group-offloaded."""
    return any(True for _ in hooks_below(root))


def _refuse_running(groups: Iterable[Any]) -> None:
    for group in groups:
        state = state_of(group)
        if state is not None and state.active:
            raise OffloadedModuleBusy(
                f"Group offloading cannot be turned off while {type(state.leader).__name__} runs: its weights are in use on "
                f"{state.device}. Turn it off between two forwards."
            )


#: The tensors that one slab holds, with their unit; None for tensors that never got one.
Held = list[tuple["Unit | None", list[Entry]]]


def take_off(root: torch.nn.Module) -> Held:
    """Removes the hooks of group offloading from a module and all below it; returns what their groups hold.

    The weights are on the offload device afterwards, still over the memory that the groups had.
    """
    groups = unique(hook.group for hook in hooks_below(root))
    for group in groups:
        if state_of(group) is None:
            _from_upstream(group)
    held = holdings(groups)
    unhook(root)
    # Also where the plugin's own patch, which does it when a hook goes, has been taken out.
    retire(groups)
    return held


def holdings(groups: list[Any]) -> Held:
    """The tensors of some groups, by unit."""
    states = [state for state in map(state_of, groups) if state is not None]
    entries = unique(entry for state in states for entry in state.entries)
    units = unique(entry.unit for entry in entries if entry.unit is not None)
    return [*((unit, list(unit.entries)) for unit in units), (None, [entry for entry in entries if entry.unit is None])]


def retire(groups: list[Any]) -> None:
    """Ends some groups: their tensors are on the offload device, and nobody moves them any more."""
    for state in map(state_of, groups):
        if state is not None:
            mover.retire(state)
            state.lane = None


def restore(held: Held, device: torch.device) -> None:
    """Gives tensors ordinary memory of their own on `device`, and the memory of their groups back, one unit after another."""
    with quiet():
        for unit, entries in held:
            # What another group still moves is that group's business.
            free = [entry for entry in entries if not entry.claims]
            _place(unit, free, device)
            if unit is not None and len(free) == len(entries):
                unit.forget()


def _place(unit: Unit | None, entries: list[Entry], device: torch.device) -> None:
    staying: list[Tensor] = []
    for entry in entries:
        leaves = Tree(entry.tensor, entry.owner).leaves
        if all(leaf.device == device for leaf in leaves):
            staying += leaves
        else:
            _move(entry.tensor, entry.owner, device)
    own([leaf for leaf in unique(staying) if is_lent(leaf, unit)])


def is_lent(leaf: Tensor, unit: Unit | None) -> bool:
    """True for a host tensor in memory that is not its own: a slab's, or pinned memory."""
    if leaf.device.type != "cpu" or not leaf.numel():
        return False
    return (unit is not None and unit.lends(leaf)) or backend.is_pinned_here(leaf) or leaf.is_pinned()


def own(leaves: list[Tensor]) -> None:
    """Copies dense host tensors into ordinary memory; those that share memory go on sharing it."""
    layout = Layout(leaves)
    copies = [source.clone() for source in layout.sources]
    for leaf, value in zip(leaves, layout.views(copies)):
        set_leaves([leaf], [value if is_counted(leaf) else inference_alias(value)])


def _move(tensor: Tensor, owner: torch.nn.Module | None, device: torch.device) -> None:
    """Moves one tensor of any kind, in place, as its class's `.to()` would."""
    binding = make_binding(tensor, owner, device, tensor.device)
    binding.bind([leaf.to(device) for leaf in binding.cargo], in_place=True)


def _bring(root: torch.nn.Module, device: torch.device) -> None:
    """Brings what is left elsewhere: tensors that no group held, and what upstream left pinned."""
    seen: set[int] = set()
    for module in root.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                entry = Entry(tensor)
                entry.owner = module if is_peculiar(tensor) else None
                _place(None, [entry], device)


def _from_upstream(group: Any) -> None:
    """Prepares a group that the plugin does not move: its weights are on disk, or were offloaded before it was active."""
    if getattr(group, "offload_to_disk_path", None):
        group.onload_()
        if group.stream is not None:
            group.stream.synchronize()
