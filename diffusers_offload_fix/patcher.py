"""Putting functions into diffusers' classes and taking them out again.

Originals are captured once, per class object, so that a reload of the target (which makes new classes) neither loses
nor mixes them. What is installed is asked of the classes, not remembered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, Literal

from diffusers_offload_fix import _startup

_ABSENT = object()


class PatchError(RuntimeError):
    """A patch could not be installed."""


@dataclass(frozen=True)
class Patch:
    """One attribute of a target module that a cure needs.

    `path` is relative to the target, "ModuleGroup.onload_". `kind` says what `make` is:
    "wrap": a wrapt wrapper `(wrapped, instance, args, kwargs)`;
    "replace": `make(original)` returns the plain function to put there (wrapt costs dynamo a graph break);
    "add": as "replace", for an attribute that the class itself may lack; `original` is then the inherited one or None.
    `parameters` are names that the live signature must have, or the patch is not installed.
    `target` is the module's name, the same one for all patches of a cure, and `versions` the releases of diffusers that have the
    attribute.
    """

    path: str
    cure: str
    kind: Literal["wrap", "replace", "add"]
    make: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    target: str = _startup.TARGET
    versions: str = ">=0.33"


class Place(str, Enum):
    """What the live attribute is."""

    PRISTINE = "pristine"
    OURS = "ours"
    FOREIGN = "foreign"
    DISPLACED = "displaced"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class _Record:
    original: Any  # the raw entry of the class dictionary, or _ABSENT
    installed: Any


_records: dict[tuple[Any, str], _Record] = {}


def locate(module: ModuleType, path: str) -> tuple[Any, str] | None:
    """The object that holds the attribute, and the attribute's name; None when the holder does not exist."""
    *parents, name = path.split(".")
    owner: Any = module
    for parent in parents:
        owner = getattr(owner, parent, None)
        if owner is None:
            return None
    return owner, name


def chain(entry: Any) -> Iterator[Any]:
    """`entry` and what it wraps, outermost first."""
    while entry is not None:
        if isinstance(entry, (staticmethod, classmethod)):
            entry = entry.__func__
        yield entry
        entry = getattr(entry, "__wrapped__", None)


def look(module: ModuleType, patch: Patch) -> Place:
    """What is live at the patch's path now."""
    spot = locate(module, patch.path)
    if spot is None:
        return Place.DRIFTED
    owner, name = spot
    entry = vars(owner).get(name, _ABSENT)
    _drop_reloaded(spot, entry)
    record = _records.get(spot)
    if record is not None:
        return Place.OURS if _holds(entry, record.installed) else Place.DISPLACED
    if entry is _ABSENT:
        return Place.PRISTINE if patch.kind == "add" else Place.DRIFTED
    if not _is_from(entry, getattr(owner, "__module__", module.__name__)):
        return Place.FOREIGN
    return Place.PRISTINE if _fits(entry, patch) else Place.DRIFTED


def _drop_reloaded(spot: tuple[Any, str], entry: Any) -> None:
    """Forgets a function of a module that was reloaded: a reload makes new classes, but the module stays the same object."""
    record = _records.get(spot)
    if record is None or not inspect.ismodule(spot[0]) or not inspect.isfunction(record.original):
        return
    if entry is not record.original and not _holds(entry, record.installed) and _is_from(entry, spot[0].__name__):
        del _records[spot]


def is_ours(entry: Any) -> bool:
    """Whether a function that this package installed is `entry`, or is wrapped by it."""
    links = {id(link) for link in chain(entry)}
    return any(id(link) in links for record in _records.values() for link in _outer(record.installed))


def original(owner: Any, name: str) -> Any:
    """The raw attribute of a class or module as it was before this package patched it; None when it had none."""
    record = _records.get((owner, name))
    entry = vars(owner).get(name) if record is None else record.original
    return None if entry is _ABSENT else entry


def install(module: ModuleType, patches: list[Patch]) -> None:
    """Install all of `patches`, or none.

    Raises PatchError, from what went wrong, with everything that this call installed undone.
    """
    done: list[tuple[Any, str]] = []
    try:
        for patch in patches:
            # A class of another module outlives a reload of the target, and so does what is installed in it.
            if look(module, patch) is not Place.OURS:
                done.append(_install(module, patch))
    except Exception as error:
        for spot in reversed(done):
            _undo(spot)
        raise PatchError(f"{patch.path}: {type(error).__name__}: {error}") from error


def undo(cure: str | None = None, module: ModuleType | None = None, patches: tuple[Patch, ...] = ()) -> list[str]:
    """Put the originals back, of every class ever patched, or of one cure's patches on the live classes.

    Returns the paths that were left alone because somebody else has put something over them since.
    """
    spots = list(_records)
    if cure is not None and module is not None:
        wanted = [locate(module, patch.path) for patch in patches if patch.cure == cure]
        spots = [spot for spot in spots if spot in wanted]
    return [f"{spot[0].__name__}.{spot[1]}" for spot in reversed(spots) if not _undo(spot)]


def _install(module: ModuleType, patch: Patch) -> tuple[Any, str]:
    spot = locate(module, patch.path)
    if spot is None:
        raise AttributeError(f"{module.__name__} has no {patch.path}")
    owner, name = spot
    original = vars(owner).get(name, _ABSENT)
    made = _make(patch, original, getattr(owner, name, None))
    setattr(owner, name, made)
    _records[spot] = _Record(original, made)
    return spot


def _make(patch: Patch, original: Any, inherited: Any) -> Any:
    if patch.kind == "wrap":
        from wrapt import FunctionWrapper

        return FunctionWrapper(original, patch.make)
    is_static = isinstance(original, staticmethod)
    function = inherited if original is _ABSENT else original.__func__ if is_static else original
    made = patch.make(function)
    if function is not None and getattr(made, "__wrapped__", None) is None:
        made.__wrapped__ = function
    return staticmethod(made) if is_static else made


def _undo(spot: tuple[Any, str]) -> bool:
    owner, name = spot
    record = _records.pop(spot)
    entry = vars(owner).get(name, _ABSENT)
    if entry is not record.installed:
        return _is_reloaded(owner, entry)
    if record.original is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, record.original)
    return True


def _is_reloaded(owner: Any, entry: Any) -> bool:
    """Whether a reload of the module has put its own function back; a reload makes new classes, but no new module."""
    return inspect.ismodule(owner) and entry is not _ABSENT and _is_from(entry, owner.__name__)


def _outer(entry: Any) -> Iterator[Any]:
    yield entry
    if isinstance(entry, staticmethod):
        yield entry.__func__


def _holds(entry: Any, installed: Any) -> bool:
    outer = [id(link) for link in _outer(installed)]
    return entry is installed or any(id(link) in outer for link in chain(entry))


def _is_from(entry: Any, origin: str) -> bool:
    """Whether every layer is code of the module named `origin`, or a layer that torch.compiler.disable put there."""
    for link in chain(entry):
        if not inspect.isfunction(link):
            return False
        home = link.__globals__.get("__name__", "")
        if home != origin and not home.startswith("torch."):
            return False
    return True


def _fits(entry: Any, patch: Patch) -> bool:
    function = entry.__func__ if isinstance(entry, staticmethod) else entry
    names = inspect.signature(function).parameters
    return all(name in names for name in patch.parameters)
