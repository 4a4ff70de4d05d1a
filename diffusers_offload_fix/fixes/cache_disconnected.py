"""G4: taking a hook out of the chain of a module's forwards disconnects the hook above it.

`HookRegistry.remove_hook` writes the new link over `forward` of the hook above; one with a `new_forward` of its own, such as a
cache's, looks for it in `original_forward`, and is itself what was in `forward`: from then on it is never called. Streams take out
their layer tracker after the first forward, and loading a LoRA takes out and puts back every hook of group offloading.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from diffusers_offload_fix import patcher
from diffusers_offload_fix.fixes import Fix


class _Module(torch.nn.Module):
    def forward(self) -> list[str]:
        return ["module"]


def _finds(module: ModuleType, original: bool) -> bool:
    registries, hooks = module.HookRegistry, module.ModelHook
    remove, register = ((patcher.original(registries, name) if original else getattr(registries, name)) for name in _NAMES)

    class Cache(hooks):  # type: ignore[misc, valid-type]
        def new_forward(self, module: torch.nn.Module) -> Any:
            return ["cache", *self.fn_ref.original_forward()]

    block = _Module()
    registry = registries(block)
    register(registry, hooks(), "below")
    register(registry, Cache(), "cache")
    remove(registry, "below", recurse=False)
    return bool(block.forward() != ["cache", "module"])


_NAMES = ("remove_hook", "register_hook")


def _probe() -> Any:
    def probe(module: ModuleType) -> bool:
        return _finds(module, original=False)

    probe.upstream = lambda module: _finds(module, original=True)  # type: ignore[attr-defined]
    return probe


FIX = Fix(
    name="cache_disconnected",
    id="G4",
    issues=(),
    summary="a cache is disconnected when a hook below it is removed (streams, LoRA loading)",
    versions=">=0.33",
    cure="mover",
    probe=_probe(),
)
