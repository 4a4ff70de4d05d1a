"""Upstream's methods of pipelines, for probes."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from diffusers_offload_fix import _startup
from diffusers_offload_fix.fixes import _method


class Component(torch.nn.Module):
    """A component that only notes what is asked of it."""

    def __init__(self, log: list[str], supports: bool = True) -> None:
        super().__init__()
        self.log, self.supports = log, supports

    def enable_group_offload(self, **arguments: Any) -> None:
        if not self.supports:
            raise ValueError("this component does not support group offloading")
        self.log.append("offloaded")


def evidence(method: str) -> Callable[[Callable[[Any], bool]], Any]:
    """Make a probe of a function that is given upstream's `DiffusionPipeline.<method>` and looks for the bug in it."""
    return _method.evidence(HOME, method)


def _globals() -> dict[str, Any]:
    return {
        "__builtins__": {**vars(builtins), "__import__": _imported},
        "torch": torch,
        "accelerate": SimpleNamespace(hooks=SimpleNamespace(remove_hook_from_module=lambda *_, **__: None)),
        "is_accelerate_available": lambda: False,
        "_check_bnb_status": lambda module: (False, False, False),
        "logger": logging.Logger(HOME.module, level=logging.CRITICAL + 1),
    }


def _imported(name: str, *arguments: Any) -> Any:
    """What a method imports while it runs."""
    return SimpleNamespace(apply_group_offloading=lambda module, **_: module.log.append("offloaded"))


HOME = _method.Home(_startup.PIPELINES, "DiffusionPipeline", _globals)
