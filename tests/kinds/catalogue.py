"""The list of kinds, each buildable on the CPU or on an accelerator, or able to say why not.

for kind in available():
    model, example = kind.build()                # quantised on the CPU
    model, example = kind.build("cuda")          # quantised after the move
    model, example = kind.resident("cuda")       # the reference: built on the CPU, then fully on the device
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Built = tuple[Any, torch.Tensor]
Device = str | torch.device
Place = Literal["cpu", "accelerator"]


class Unavailable(Exception):
    """Raised by a builder that knows that it cannot work here; its message is the reason."""


@dataclass(frozen=True)
class Kind:
    """One kind of tensor inside a model.

    Tags: `tied`, `buffers` (forward changes them), `strides`, `repack` (bytes or class depend on the device),
    `refuses-accelerator`, `refuses-cpu` (the class's own `.to` raises), `refuses-in-forward` (it moves, but its
    forward raises off the CPU), `rebuild` (no `.to` at all), `outside`
    (tensors outside parameters and buffers), `order` (made for changing `plan`), `state` (forward changes module
    state), `wrapper` (a traceable wrapper subclass).
    """

    name: str
    library: str
    make: Callable[[Device, int], Built] = field(repr=False)
    quantised_on: tuple[Place, ...] = ("cpu", "accelerator")
    tags: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    settle: Callable[[Any, torch.device], object] | None = field(default=None, repr=False)
    """Moves what the library's own `.to` on a whole model forgets."""

    def build(self, device: Device = "cpu", seed: int = 0) -> Built:
        """Return the model on `device`, and an example input on the CPU; the same bytes for the same seed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make(device, seed)

    def resident(self, device: Device, seed: int = 0, quantised_on: Place = "cpu") -> Built:
        """Return the model wholly on `device`: what an offloaded model is compared with."""
        if quantised_on == "accelerator" or "rebuild" in self.tags or torch.device(device).type == "cpu":
            return self.build(device, seed)
        model, example = self.build("cpu", seed)
        model = model.to(device)
        if self.settle is not None:
            self.settle(model, torch.device(device))
        return model, example

    def reason(self, device: Device = "cpu") -> str | None:
        """Say why the kind cannot be built on `device`, or return None."""
        return _reason(self, torch.device(device))

    def runs(self, device: Device = "cpu", quantised_on: Place = "cpu") -> str | None:
        """Say why the fully resident model does not run on `device`, or return None."""
        return _runs(self, torch.device(device), quantised_on)


@functools.cache
def _reason(kind: Kind, device: torch.device) -> str | None:
    place = "cpu" if device.type == "cpu" else "accelerator"
    if place not in kind.quantised_on:
        return f"not made on the {place}"
    return _missing(kind.needs) or _trial(lambda: kind.build(device))


@functools.cache
def _runs(kind: Kind, device: torch.device, quantised_on: Place) -> str | None:
    def forward() -> None:
        model, example = kind.resident(device, quantised_on=quantised_on)
        with torch.no_grad():
            model(example.to(device))

    built_on = device if quantised_on == "accelerator" else torch.device("cpu")
    return kind.reason(built_on) or _trial(forward)


def _missing(modules: Iterable[str]) -> str | None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a library may fail in any way while it loads
            return f"import {module}: {_brief(error)}"
    return None


def _trial(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Unavailable as error:
        return str(error)
    except Exception as error:  # the reason is whatever the library says
        return _brief(error)
    return None


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _collect() -> dict[str, Kind]:
    from . import kinds_other, kinds_own, kinds_plain, kinds_quanto, kinds_torchao

    found: dict[str, Kind] = {}
    for module in (kinds_plain, kinds_own, kinds_torchao, kinds_quanto, kinds_other):
        for kind in module.kinds():
            if kind.name in found:
                raise ValueError(f"two kinds are named {kind.name}")
            found[kind.name] = kind
    return found


def available(device: Device = "cpu") -> dict[str, Kind]:
    """Return the kinds that can be built on `device` with what is installed."""
    return {name: kind for name, kind in KINDS.items() if kind.reason(device) is None}


KINDS: dict[str, Kind] = {}
KINDS.update(_collect())
