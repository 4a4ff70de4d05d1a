"""Methods of upstream's classes, for probes: rebuilt over other globals, so that nothing large is imported.

The modules of pipelines and models take seconds to import and may never be needed, so a method that is not there yet is read from its
source.
"""

from __future__ import annotations
import __future__

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

from diffusers_offload_fix import _startup, patcher


@dataclass(frozen=True)
class Home:
    """The class that has a method.

    `module` and `cls` are its names, `names` makes the globals that the rebuilt method sees, and `base` is what the method takes for
    the class where it says `super()`.
    """

    module: str
    cls: str
    names: Callable[[], dict[str, Any]]
    base: type = object


def evidence(home: Home, method: str) -> Callable[[Callable[[Any], bool]], Any]:
    """Make a probe of a function that is given upstream's method and looks for the bug in it.

    The probe answers False once the plugin's own method is live, or is waiting for the module to be imported.
    """

    def decorate(find: Callable[[Any], bool]) -> Any:
        @wraps(find)
        def probe(module: ModuleType) -> bool:
            return not _is_cured(home, method) and upstream(module)

        def upstream(module: ModuleType) -> bool:
            function = _method(home, module, method)
            return function is not None and find(function)

        probe.upstream = upstream  # type: ignore[attr-defined]
        return probe

    return decorate


def _is_cured(home: Home, method: str) -> bool:
    module = sys.modules.get(home.module)
    if module is None:
        return _startup.is_armed()
    return patcher.is_ours(vars(getattr(module, home.cls)).get(method))


def _method(home: Home, module: ModuleType, name: str) -> Any:
    cls = getattr(sys.modules.get(home.module), home.cls, None)
    if cls is None:
        path = Path(str(module.__file__)).parents[2].joinpath(*home.module.split(".")).with_suffix(".py")
        return _from_source(home, path, name)
    function = patcher.original(cls, name)
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    cells = [CellType(home.base) if free == "__class__" else cell for free, cell in zip(code.co_freevars, function.__closure__ or ())]
    return FunctionType(code, home.names(), name, function.__defaults__, tuple(cells))


@functools.cache
def _from_source(home: Home, path: Path, name: str) -> Any:
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(rf"^    def {name}\(.*?(?=^    (?:def|@)|^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    # `super()` looks for the class in the function around the method.
    code = f"def make(__class__):\n{found.group()}\n    return {name}\n"
    namespace = home.names()
    flags = __future__.annotations.compiler_flag
    exec(compile(code, str(path), "exec", flags, dont_inherit=True), namespace)
    return namespace["make"](home.base)
