"""Layerwise casting of offloaded weights: after a layer has run, its weights get back the bytes that they had before (G14).

Upstream casts to the small dtype again after each forward. The values are the same, but in other memory: the mover would have to
take them for changed weights, and copy them back to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .tree import is_wrapper

Function = Callable[..., Any]

_ATTACHED = "_offload_fix_keeps"


def attach(hook: Any) -> None:
    """Makes a `LayerwiseCastingHook` that is part of a chain keep the bytes, where casting and casting back loses nothing."""
    if hasattr(hook, _ATTACHED) or not is_exact(hook.storage_dtype, hook.compute_dtype):
        return
    kept: list[tuple[Tensor, Tensor, int]] = []
    setattr(hook, _ATTACHED, True)
    hook.fn_ref.pre_forward = _keeping(hook, hook.fn_ref.pre_forward, kept)
    hook.fn_ref.post_forward = _restoring(hook.fn_ref.post_forward, kept)


def detach(hook: Any) -> None:
    """Makes a copied hook one that is part of no chain yet."""
    hook.__dict__.pop(_ATTACHED, None)


def _keeping(hook: Any, original: Function, kept: list[tuple[Tensor, Tensor, int]]) -> Function:
    @functools.wraps(original)
    def pre_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            small = [p for p in module.parameters() if p.dtype == hook.storage_dtype and not is_wrapper(p)]
            kept[:] = [(parameter, parameter.data, parameter._version) for parameter in small if not parameter.is_inference()]
        return original(module, *args, **kwargs)

    return pre_forward


def _restoring(original: Function, kept: list[tuple[Tensor, Tensor, int]]) -> Function:
    @functools.wraps(original)
    def post_forward(module: torch.nn.Module, output: Any) -> Any:
        for parameter, data, version in kept:
            # One that forward has changed keeps the change.
            if parameter._version == version and parameter.device == data.device:
                parameter.data = data
        kept.clear()
        return original(module, output)

    return post_forward


@functools.cache
def is_exact(storage: torch.dtype, compute: torch.dtype) -> bool:
    """True if every value of `storage` is one of `compute`, so that casting there and back changes no bit."""
    if not (storage.is_floating_point and compute.is_floating_point):
        return False
    small, large = torch.finfo(storage), torch.finfo(compute)
    return large.eps <= small.eps and large.max >= small.max and large.tiny * large.eps <= small.tiny * small.eps
