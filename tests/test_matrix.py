"""The matrix: every kind of tensor in every memory mode, bit for bit equal to the resident model, on the simulated accelerator.

The whole matrix runs with DIFFUSERS_OFFLOAD_FIX_FULL=1 (nox -s matrix); without it the plain kinds run in every mode and the others in
the modes that differ in how bytes travel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import diffusers_offload_fix  # noqa: F401
from diffusers_offload_fix import binding, slots, staging, transfer
from tests import cells, simulated
from tests.kinds.catalogue import KINDS

FULL = bool(os.environ.get("DIFFUSERS_OFFLOAD_FIX_FULL"))
#: Modes whose bytes take different ways; the rest differ in flags that the plugin makes harmless.
TELLING = ("block2", "block+stream", "block+stream+low", "leaf", "leaf+stream", "leaf+stream+low")
EVERY_MODE = ("plain-bfloat16", "plain-float32", "plain-tied-root", "plain-changing-buffers", "own-nested", "torchao-int8wo")


def _cells() -> Iterator[Any]:
    for name, kind in KINDS.items():
        modes = cells.MODES if FULL or name in EVERY_MODE else TELLING
        for place in kind.quantised_on:
            for mode in modes:
                yield pytest.param(name, place, mode, id=f"{name}-{place}-{mode}")


@pytest.mark.parametrize(("name", "place", "mode"), list(_cells()))
def test_cell(name: str, place: str, mode: str, npu: torch.device) -> None:
    reason = KINDS[name].runs(npu, place)
    if reason is not None:
        pytest.skip(reason)
    assert cells.run(name, cells.MODES[mode], simulated.setting(), place) == []


WRAPPERS = [name for name, kind in KINDS.items() if "wrapper" in kind.tags]


@pytest.mark.parametrize("mode", ["block+stream", "leaf+stream+low"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_cell_without_swapping(name: str, mode: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch refuses to swap a wrapper, moving it in place has the same result."""
    place = KINDS[name].quantised_on[0]
    reason = KINDS[name].runs(npu, place)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(binding, "forced_way", "in_place")
    assert cells.run(name, cells.MODES[mode], simulated.setting(), place) == []


@pytest.mark.parametrize("mode", ["block+stream+low", "leaf+stream+low", "block"])
@pytest.mark.parametrize("name", ["plain-bfloat16", "plain-tied-root", "plain-strided", "torchao-int8wo", "quanto-qint8"])
def test_cell_through_small_staging_buffers(name: str, mode: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are smaller than a staging buffer: with buffers of 2 KiB their weights pass through in many pieces."""
    monkeypatch.setattr(transfer, "SMALL", 0)
    monkeypatch.setattr(transfer, "CHUNK", 2048)
    monkeypatch.setattr(staging, "CHUNK", 2048)
    assert cells.run(name, cells.MODES[mode], simulated.setting()) == []


@pytest.mark.parametrize("mode", ["block", "block+stream", "leaf+stream", "block+stream+low"])
@pytest.mark.parametrize("name", ["plain-bfloat16", "plain-tied-root", "torchao-int8wo", "quanto-qint8"])
def test_cell_where_storages_do_not_resize(name: str, mode: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose storages keep their size gets new memory for every forward, and none is kept either."""
    monkeypatch.setattr(slots, "storages_resize", lambda device_type: False)
    assert cells.run(name, cells.MODES[mode], simulated.setting()) == []
