"""Telling which weights were used outside the forward that brings them.

At leaf level a weight comes with its own module's forward, at block level with its block's. A parent that reads it by itself
(`F.linear(x, self.proj.weight)`), or code that runs a piece of a block, finds it on the host, and torch only says that two tensors are
on different devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from .tree import Tree
from .unhook import hook_of

#: How torch, its libraries and its backends say that a weight is somewhere else.
_MISMATCH = re.compile(r"same device|weight type|on cpu|device type|different device|not on the expected device", re.IGNORECASE)
#: Set on an error that has been explained.
_TOLD = "_offload_fix_told"

MESSAGE = (
    "{error}\nGroup offloading: {names} of {owner} ({kind}) {verb} needed on {device} outside the forward that brings {them} there, and "
    "{verb} still on the host. Leave this model out of group offloading (`exclude_modules`), {or_else}."
)
BLOCK = 'or use offload_type="block_level", which brings what a block has as a whole'
RUN = "or run the module that has them through its own forward"


def explain(error: BaseException, root: torch.nn.Module, device: torch.device) -> None:
    """Adds to a device mismatch which weights below `root` were meant, if it was such a one."""
    if not isinstance(error, RuntimeError) or getattr(error, _TOLD, False) or not _MISMATCH.search(str(error)):
        return
    for owner, frame in _modules_in(error.__traceback__):
        names = list(_left_behind(owner, frame, device))
        if names:
            error.args = (_message(error, owner, names, root, device), *error.args[1:])
            error.__dict__[_TOLD] = True
            return


def _modules_in(trace: TracebackType | None) -> Iterator[tuple[torch.nn.Module, FrameType]]:
    """The modules whose code was running, innermost first."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            yield owner, frame


def _left_behind(owner: torch.nn.Module, frame: FrameType, device: torch.device) -> Iterator[str]:
    """Tensors below `owner` that its code names and that are not on the device."""
    named = set(frame.f_code.co_names)
    for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
        if set(re.findall(r"[A-Za-z_]\w*", name)) <= named and any(leaf.device != device for leaf in Tree(tensor).leaves):
            yield name


def _message(error: BaseException, owner: torch.nn.Module, names: list[str], root: torch.nn.Module, device: torch.device) -> str:
    place = next((name for name, module in root.named_modules() if module is owner), "")
    several = len(names) > 1
    leaf = any(hook_of(module) is not None for module in owner.modules())
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
