"""Weights that are used outside the forward that brings them.

At leaf level a weight comes with its own module's forward, at block level with its block's. A parent that reads it by itself
(`F.linear(x, self.proj.weight)`, and torch's own multi-head attention) would find it on the host: where its forward says so, the
weight comes with the parent too. Other code (a processor, a piece of a block that is run by itself) gets an error that says which
weights were meant, where torch only says that two tensors are on different devices.
"""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any

import torch

from .groups import group_hooks
from .tree import Tree

#: How torch, its libraries and its backends say that a weight is somewhere else.
_MISMATCH = re.compile(r"same device|weight type|on cpu|device type|different device|not on the expected device", re.IGNORECASE)
#: Set on an error that has been explained.
_TOLD = "_offload_fix_told"

MESSAGE = (
    "{error}\nGroup offloading: {names} of {owner} ({kind}) {verb} needed on {device} outside the forward that brings {them} "
    "there, and {verb} still on the host. Leave this model out of group offloading (`exclude_modules`), {or_else}."
)
BLOCK = 'or use offload_type="block_level", which brings what a block has as a whole'
RUN = "or run the module that has them through its own forward"


def explain(error: BaseException, root: torch.nn.Module, device: torch.device) -> None:
    """Adds to a device mismatch which weights below `root` were meant, if it was such a one."""
    if not isinstance(error, RuntimeError) or getattr(error, _TOLD, False) or not _MISMATCH.search(str(error)):
        return
    for owner, chains in _modules_in(error.__traceback__):
        names = list(_left_behind(owner, chains, device))
        if names:
            error.args = (_message(error, owner, names, root, device), *error.args[1:])
            error.__dict__[_TOLD] = True
            return


def _modules_in(trace: TracebackType | None) -> Iterator[tuple[torch.nn.Module, set[tuple[str, ...]]]]:
    """The modules in the code that was running, innermost first, each with what that code reads of it."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, torch.nn.Module):
                yield value, {chain[1:] for chain in reads(frame.f_code) if chain[0] == name}


@functools.lru_cache(maxsize=4096)
def reads(code: CodeType) -> frozenset[tuple[str, ...]]:
    """Chains of attributes that a function reads, each after the variable that it starts from: `("self", "proj", "weight")`.

    Indices are left out, so a chain also stands for the items of a list.
    """
    chains: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            chains.add(chain)
            chain = (step.argval[-1] if isinstance(step.argval, tuple) else step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain += (step.argval,)
        elif step.opname not in _BETWEEN:
            chains.add(chain)
            chain = ()
    return frozenset(found for found in chains if len(found) > 1)


#: What may stand between two attributes: an index, and what the interpreter puts there for itself.
_BETWEEN = ("LOAD_CONST", "LOAD_SMALL_INT", "BINARY_SUBSCR", "BINARY_OP", "CACHE", "NOP")


def atoms(name: str) -> tuple[str, ...]:
    """The attributes in the name of a tensor or module, without the indices of lists."""
    return tuple(part for part in name.split(".") if not part.isdigit())


def lent(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules below `module` of which its forward reads a tensor without running them."""
    code = getattr(type(module).forward, "__code__", None)
    chains = reads(code) if isinstance(code, CodeType) and code.co_argcount else frozenset()
    wanted = {chain[1:] for chain in chains if chain[0] == code.co_varnames[0] and len(chain) > 2} if code is not None else set()
    if not wanted:
        return
    for name, below in module.named_modules():
        tensors = (*below._parameters, *below._buffers)
        if name and any((*atoms(name), tensor) in wanted for tensor in tensors):
            yield below


def _left_behind(owner: torch.nn.Module, chains: set[tuple[str, ...]], device: torch.device) -> Iterator[str]:
    """Tensors below `owner` that its code reads and that are not on the device."""
    for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
        if atoms(name) in chains and any(leaf.device != device for leaf in Tree(tensor).leaves):
            yield name


def _message(error: BaseException, owner: torch.nn.Module, names: list[str], root: torch.nn.Module, device: torch.device) -> str:
    place = next((name for name, module in root.named_modules() if module is owner), "")
    several = len(names) > 1
    leaf = any(group_hooks(module) is not None for module in owner.modules())
    words: dict[str, Any] = {
        "error": error,
        "names": ", ".join(names[:6]),
        "owner": f"{type(root).__name__}.{place}" if place else type(root).__name__,
        "kind": type(owner).__name__,
        "device": device,
        "verb": "were" if several else "was",
        "them": "them" if several else "it",
        "or_else": BLOCK if leaf else RUN,
    }
    return MESSAGE.format(**words)
