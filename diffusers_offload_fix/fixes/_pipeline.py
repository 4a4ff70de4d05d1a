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


class Converted(torch.nn.Module):
    """A component that only notes the arguments of its `to`."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += [*args, *kwargs.values()]
        return self


def evidence(method: str, is_modular: bool = False) -> Callable[[Callable[[Any], bool]], Any]:
    """Make a probe of a function that is given upstream's method of that name, of `DiffusionPipeline` or of `ModularPipeline`."""
    return _method.evidence(MODULAR if is_modular else HOME, method)


def drops_dtype(method: Any) -> bool:
    """Whether a pipeline's `to(dtype)` leaves a group-offloaded component out."""
    component = Converted()
    pipeline = SimpleNamespace(
        components={"transformer": component},
        transformer=component,
        hf_device_map=None,
        _is_pipeline_device_mapped=lambda: False,
        _get_signature_keys=lambda pipeline: ({"transformer"}, set()),
        _maybe_raise_error_if_group_offload_active=lambda **_: True,
    )
    method(pipeline, torch.float16)
    return torch.float16 not in component.asked


def _globals() -> dict[str, Any]:
    return {
        "__builtins__": {**vars(builtins), "__import__": _imported},
        "torch": torch,
        "accelerate": SimpleNamespace(hooks=SimpleNamespace(remove_hook_from_module=lambda *_, **__: None)),
        "logger": logging.Logger(_startup.PIPELINES, level=logging.CRITICAL + 1),
        **vars(_HELPERS),
    }


def _imported(name: str, *arguments: Any) -> Any:
    """What a method imports while it runs."""
    return _HELPERS


#: Upstream's functions; some methods import them, others find them in their module.
_HELPERS = SimpleNamespace(
    apply_group_offloading=lambda module, **_: module.log.append("offloaded"),
    _check_bnb_status=lambda module: (False, False, False),
    is_accelerate_available=lambda: False,
    is_accelerate_version=lambda *_: False,
    is_hpu_available=lambda: False,
    is_transformers_version=lambda *_: False,
)
HOME = _method.Home(_startup.PIPELINES, "DiffusionPipeline", _globals)
MODULAR = _method.Home(_startup.MODULAR, "ModularPipeline", _globals)
