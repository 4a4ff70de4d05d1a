"""`.to()` of models and pipelines that are group-offloaded: the device is refused, as upstream does, and the dtype is applied.

Upstream looks for a device among the arguments and returns at once when it finds one, so that the dtype beside it is lost; a device
that is given as a number or by another tensor it does not find, and moves the offloaded weights there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from . import _startup
from .patcher import Patch
from .removal import is_hooked, modules_of

logger = logging.getLogger("diffusers_offload_fix")

Function = Callable[..., Any]


def model_to(original: Function) -> Function:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Converts the model, as `torch.nn.Module.to`; while it is group-offloaded its device stays, with upstream's warning.

        What upstream and torch refuse (a quantised model, a dtype that is no floating point) raises as it does there, and nothing has
        changed then.
        """
        if not is_hooked(self):
            return original(self, *args, **kwargs)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        # To upstream even `dtype=None` is a dtype, and `device=None` a device: only what is given is passed on.
        wanted = {"dtype": dtype, "memory_format": memory_format}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        if wanted:
            # Before the device is looked at: what is refused is refused as a whole.
            original(self, non_blocking=non_blocking, **wanted)
        return self if device is None else original(self, device)

    return to


def pipeline_to(original: Function) -> Function:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Converts the pipeline; group-offloaded components stay where they are and take the dtype.

        Quantised ones keep their dtype, with a warning. What upstream refuses raises before a group-offloaded component has changed.
        """
        dtype = kwargs.get("dtype") or next((value for value in args if isinstance(value, torch.dtype)), None)
        converted = original(self, *args, **kwargs)
        if dtype is not None:
            for module in filter(is_hooked, modules_of(self)):
                _cast(module, dtype)
        return converted

    return to


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    if not getattr(module, "is_quantized", False):
        module.to(dtype)
    elif not (getattr(module, "is_loaded_in_4bit", False) or getattr(module, "is_loaded_in_8bit", False)):
        # For bitsandbytes upstream has said so.
        logger.warning("%s is quantised: its weights are not converted to %s.", type(module).__name__, dtype)


#: What is put into `diffusers.models.modeling_utils`, and into `diffusers.modular_pipelines.modular_pipeline`.
PATCHES: tuple[Patch, ...] = (
    Patch("ModelMixin.to", "models", "replace", model_to, ("self", "args", "kwargs"), target=_startup.MODELS),
    Patch("ModularPipeline.to", "modular", "replace", pipeline_to, ("self",), target=_startup.MODULAR, versions=">=0.35"),
)
