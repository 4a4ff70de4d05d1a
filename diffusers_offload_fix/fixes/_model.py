"""Upstream's methods of models, for probes: the model is a stand-in that counts as group-offloaded."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from diffusers_offload_fix import _startup
from diffusers_offload_fix.fixes import _method


class Model(torch.nn.Module):
    """A model without weights that notes what its `to` comes to."""

    _keep_in_fp32_modules = None

    def __init__(self) -> None:
        super().__init__()
        self.converted: list[tuple[Any, ...]] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        self.converted.append((device, dtype))
        return self


class Offloaded(Model):
    """What upstream's method is called on."""


def evidence(method: str) -> Callable[[Callable[[Any], bool]], Any]:
    """Make a probe of a function that is given upstream's `ModelMixin.<method>` and looks for the bug in it."""
    return _method.evidence(HOME, method)


def _globals() -> dict[str, Any]:
    return {
        "__builtins__": {**vars(builtins), "__import__": _imported},
        "torch": torch,
        "QuantizationMethod": SimpleNamespace(BITS_AND_BYTES="bitsandbytes"),
        "logger": logging.Logger(_startup.MODELS, level=logging.CRITICAL + 1),
    }


def _imported(name: str, *arguments: Any) -> Any:
    """What a method imports while it runs."""
    return SimpleNamespace(_is_group_offload_enabled=lambda module: True)


HOME = _method.Home(_startup.MODELS, "ModelMixin", _globals, base=Offloaded)
