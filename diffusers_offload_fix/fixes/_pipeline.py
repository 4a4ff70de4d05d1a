"""Upstream's methods of pipelines, for probes: rebuilt over other globals, so that nothing large is imported.

The module of the pipelines takes seconds to import and may never be needed, so a method that is not there yet is read from its source.
"""

from __future__ import annotations
import __future__

import builtins
import functools
import logging
import re
import sys
import textwrap
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from diffusers_offload_fix import _startup, patcher

NAME = _startup.OTHERS[0]


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
    """Make a probe of a function that is given upstream's `DiffusionPipeline.<method>` and looks for the bug in it.

    The probe answers False once the plugin's own method is live, or is waiting for the pipelines to be imported.
    """

    def decorate(find: Callable[[Any], bool]) -> Any:
        @wraps(find)
        def probe(module: ModuleType) -> bool:
            return not _is_cured(method) and upstream(module)

        def upstream(module: ModuleType) -> bool:
            function = _method(module, method)
            return function is not None and find(function)

        probe.upstream = upstream  # type: ignore[attr-defined]
        return probe

    return decorate


def _is_cured(method: str) -> bool:
    pipelines = sys.modules.get(NAME)
    if pipelines is None:
        return _startup.is_armed()
    return patcher.is_ours(vars(pipelines.DiffusionPipeline).get(method))


def _method(module: ModuleType, name: str) -> Any:
    pipelines = sys.modules.get(NAME)
    cls = getattr(pipelines, "DiffusionPipeline", None)
    if cls is None:
        return _from_source(Path(str(module.__file__)).parents[1] / "pipelines" / "pipeline_utils.py", name)
    function = patcher.original(cls, name)
    if not isinstance(function, FunctionType):
        return None
    return FunctionType(function.__code__, _globals(), name, function.__defaults__, function.__closure__)


@functools.cache
def _from_source(path: Path, name: str) -> Any:
    source = path.read_text(encoding="utf-8")
    found = re.search(rf"^    def {name}\(.*?(?=^    (?:def|@)|^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    namespace = _globals()
    flags = __future__.annotations.compiler_flag
    exec(compile(textwrap.dedent(found.group()), str(path), "exec", flags, dont_inherit=True), namespace)
    return namespace[name]


def _globals() -> dict[str, Any]:
    return {
        "__builtins__": {**vars(builtins), "__import__": _imported},
        "torch": torch,
        "accelerate": SimpleNamespace(hooks=SimpleNamespace(remove_hook_from_module=lambda *_, **__: None)),
        "logger": logging.Logger(NAME, level=logging.CRITICAL + 1),
    }


def _imported(name: str, *arguments: Any) -> Any:
    """What a method imports while it runs."""
    return SimpleNamespace(apply_group_offloading=lambda module, **_: module.log.append("offloaded"))
