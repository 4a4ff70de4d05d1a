"""The evidence: one small module an upstream bug, each exporting one `FIX`.

A bug is added or retired by adding or removing one file. Files whose name starts with an underscore are not bugs.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol


class Probe(Protocol):
    """Answers whether the live classes have the bug; `upstream` answers it for upstream's own code, patched or not."""

    upstream: Callable[[ModuleType], bool]

    def __call__(self, module: ModuleType, /) -> bool: ...


@dataclass(frozen=True)
class Fix:
    """One upstream bug.

    `id` is the row of the project's list of field reports, `issues` where it is discussed upstream (empty: nowhere
    yet), `versions` the releases of diffusers that have it, `needs` other distributions without which it cannot
    occur, and `cure` the group of patches that cures it.
    """

    name: str
    id: str
    issues: tuple[str, ...]
    summary: str
    versions: str
    cure: str
    probe: Probe
    needs: tuple[str, ...] = ()

    def is_in_upstream(self, module: ModuleType) -> bool:
        """Whether upstream's own code has the bug, whatever has been patched over it."""
        return self.probe.upstream(module)


def all_fixes() -> tuple[Fix, ...]:
    """Every fix, in the order of its id: G3, G11, Q1, Q2, Q10. None without torch, where nothing can be offloaded."""
    if importlib.util.find_spec("torch") is None:
        return ()
    names = [item.name for item in pkgutil.iter_modules(__path__) if not item.name.startswith("_")]
    fixes = [importlib.import_module(f"{__name__}.{name}").FIX for name in names]
    return tuple(sorted(fixes, key=_order))


def _order(fix: Fix) -> tuple[str, int, str]:
    match = re.fullmatch(r"([A-Za-z]+)(\d*)", fix.id)
    letters, digits = match.groups() if match else (fix.id, "")
    return letters, int(digits or 0), fix.name
