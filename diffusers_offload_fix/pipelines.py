"""Group offloading of whole pipelines: all of its components or none, and the way out."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from . import _startup, conversion, loops
from .applying import applied_below, put_back
from .patcher import Patch
from .removal import disable_group_offload, is_hooked, modules_of

logger = logging.getLogger("diffusers_offload_fix")

Function = Callable[..., Any]


def _remove_all_hooks(original: Function) -> Function:
    def remove_all_hooks(self: Any) -> None:
        """Removes the hooks of every offloading, group offloading included (G13)."""
        original(self)
        disable_group_offload(self)

    return remove_all_hooks


def _enable_group_offload(original: Function) -> Function:
    signature = inspect.signature(original)

    def enable_group_offload(self: Any, *args: Any, **kwargs: Any) -> None:
        """Offloads the components; those that do not support it stay on the onload device, with a warning that names them (G8)."""
        arguments = signature.bind(self, *args, **kwargs)
        arguments.apply_defaults()
        values = arguments.arguments
        excluded = _names(values["exclude_modules"])
        unsupported = [name for name in _unsupported(self) if name not in excluded]
        values["exclude_modules"] = [*excluded, *unsupported]
        with _Whole(self) as whole:
            # A component that is offloaded from before would refuse to be moved.
            for name in values["exclude_modules"]:
                whole.take_out(getattr(self, name, None), values["onload_device"])
            original(*arguments.args, **arguments.kwargs)
        if unsupported:
            logger.warning(
                "%s: group offloading is not supported by %s. They stay on %s as a whole; list them in `exclude_modules` to say so.",
                type(self).__name__,
                ", ".join(f"{name} ({type(getattr(self, name)).__name__})" for name in unsupported),
                values["onload_device"],
            )

    return enable_group_offload


def _names(excluded: Any) -> list[str]:
    return [excluded] if isinstance(excluded, str) else list(excluded or ())


def _unsupported(pipeline: Any) -> list[str]:
    """The components whose class says that it cannot be group-offloaded."""
    modules = {name: value for name, value in pipeline.components.items() if isinstance(value, torch.nn.Module)}
    return [name for name, value in modules.items() if getattr(value, "_supports_group_offloading", True) is False]


class _Whole:
    """Components that are offloaded as one: if the body raises, each is again as it was before."""

    def __init__(self, pipeline: Any) -> None:
        self._before = [(module, applied_below(module)) for module in modules_of(pipeline)]

    def __enter__(self) -> _Whole:
        return self

    def take_out(self, module: Any, device: Any) -> None:
        """Makes a component that is not to be offloaded an ordinary one on `device`."""
        if isinstance(module, torch.nn.Module) and is_hooked(module):
            disable_group_offload(module, device)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            return
        for module, before in self._before:
            if applied_below(module) != before:
                disable_group_offload(module)
                put_back(before)


#: Everything that is put into `diffusers.pipelines.pipeline_utils`.
PATCHES: tuple[Patch, ...] = (
    Patch("DiffusionPipeline.progress_bar", "pipelines", "replace", loops.progress_bar, ("self",), target=_startup.PIPELINES),
    Patch("DiffusionPipeline.to", "pipelines", "replace", conversion.pipeline_to, ("self",), target=_startup.PIPELINES),
    Patch("DiffusionPipeline.remove_all_hooks", "pipelines", "replace", _remove_all_hooks, ("self",), target=_startup.PIPELINES),
    Patch(
        "DiffusionPipeline.enable_group_offload",
        "pipelines",
        "replace",
        _enable_group_offload,
        ("self", "onload_device", "exclude_modules"),
        target=_startup.PIPELINES,
        versions=">=0.36",
    ),
)
