"""Wrapper subclasses of the test suite itself: what the code under test must treat right without knowing them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from . import own, repack
from .catalogue import Built, Device, Kind, Place
from .models import build_stack


def _own(name: str, wrapper: type[Any], *tags: str, quantised_on: tuple[Place, ...] = ("cpu", "accelerator")) -> Kind:
    def build(device: Device, seed: int) -> Built:
        return build_stack(device=device, seed=seed, dtype=torch.bfloat16, quantise=partial(own.quantise_with, wrapper))

    return Kind(f"own-{name}", "own", build, quantised_on, frozenset({"wrapper", *tags}))


def kinds() -> Iterator[Kind]:
    """Yield the kinds made of `own` and `repack`."""
    yield _own("bare", own.Bare, "rebuild")
    yield _own("movable", own.Movable)
    yield _own("slots", own.Slotted)
    yield _own("attributes", own.Attributed)
    yield _own("nested", own.Nested)
    yield _own("three-deep", own.Deep)
    yield _own("repack-class", repack.HostNibbles, "repack", "outside")
    yield _own("repack-bytes", repack.SwizzledNibbles, "repack")
    yield _own("host-only", repack.HostOnlyNibbles, "refuses-accelerator", quantised_on=("cpu",))
    yield _own("device-only", repack.DeviceOnlyNibbles, "refuses-cpu")
