"""The matrix with the weights in files: a few kinds of each sort, or with DIFFUSERS_OFFLOAD_FIX_FULL=1 every kind in every mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diffusers_offload_fix import files, homes, pages, staging, transfer
from tests import cells, simulated
from tests.kinds.catalogue import KINDS

FULL = bool(os.environ.get("DIFFUSERS_OFFLOAD_FIX_FULL"))
#: bitsandbytes compiles its kernels for the CPU first, which takes longer than all of these together.
FEW = (
    *("plain-bfloat16", "plain-odd-sizes", "plain-expanded", "plain-strided", "plain-shared-storage", "plain-batch-norm"),
    *("plain-tied-neighbours", "plain-tied-root", "plain-tied-buffers", "plain-changing-buffers"),
    *("own-nested", "own-repack-class", "own-repack-bytes", "torchao-int8wo", "torchao-intx-int4", "torchao-nf4"),
    *("quanto-qint8", "quanto-qint4-tinygemm", "own-attributes", "own-slots", "gguf-q4_0", "dtensor-shard"),
)
TELLING = ("block2+disk", "leaf+stream+record+disk")
PLAIN = "plain-bfloat16"


def _cells() -> Iterator[Any]:
    for name, kind in KINDS.items():
        modes = cells.DISK_MODES if FULL or name == PLAIN else TELLING
        for place in kind.quantised_on if FULL or name in FEW else ():
            for mode in modes:
                yield pytest.param(name, place, mode, id=f"{name}-{place}-{mode}")


def test_the_few_exist() -> None:
    assert set(FEW) <= KINDS.keys()


@pytest.mark.parametrize(("name", "place", "mode"), list(_cells()))
def test_cell(name: str, place: str, mode: str, npu: torch.device) -> None:
    reason = KINDS[name].runs(npu, place)
    if reason is not None:
        pytest.skip(reason)
    assert cells.run(name, cells.DISK_MODES[mode], simulated.setting(), place) == []


@pytest.mark.parametrize("mode", ["block+disk", "leaf+stream+disk"])
@pytest.mark.parametrize("name", ["plain-bfloat16", "plain-tied-root", "torchao-int8wo", "quanto-qint8"])
def test_cell_in_small_pieces(name: str, mode: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are smaller than a piece: with small ones their weights are written and pass through in many."""
    for module, limit in ((transfer, "CHUNK"), (staging, "CHUNK"), (files, "PIECE")):
        monkeypatch.setattr(module, limit, 4096)
    assert cells.run(name, cells.DISK_MODES[mode], simulated.setting()) == []


@pytest.mark.parametrize("lost", ["pages", "cache", "ring"])
def test_cell_on_a_system_that_does_not_help(lost: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No word about written pages, none about the page cache, no pinned memory."""
    if lost == "pages":
        monkeypatch.setattr(pages, "_PAGEMAP", "/nonexistent")
    elif lost == "cache":
        monkeypatch.setattr(pages, "cached", lambda address, offsets: False)
    else:
        monkeypatch.setattr(transfer.Transfer, "_make_ring", lambda self, largest, is_file: None)
        monkeypatch.setattr(homes, "_warned", {"pin"})
    for name in ("plain-bfloat16", "own-repack-class"):
        assert cells.run(name, cells.DISK_MODES["leaf+stream+disk"], simulated.setting()) == []
