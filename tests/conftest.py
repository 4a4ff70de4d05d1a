"""The simulated accelerator for every test that asks for it, loaded before anything imports diffusers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# The models are tiny: threads only get into each other's way, and two workers share the machine. Read when torch is imported, here
# and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import sim

if not os.environ.get("DIFFUSERS_OFFLOAD_FIX_TEST_GPU"):
    sim.load()


@pytest.fixture(scope="session")
def _libraries() -> None:
    """Imports what is large, and keeps it out of garbage collection, which every cell asks for many times."""
    import diffusers.hooks.group_offloading  # noqa: F401

    from tests.kinds.catalogue import KINDS

    for kind in KINDS.values():
        kind.reason("cpu")
    gc.collect()
    gc.freeze()


@pytest.fixture
def npu(_libraries: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The first simulated device, at rest before, and without any unordered use of memory afterwards."""
    from diffusers_offload_fix import idle, lane

    # The models are tiny: with the real limit every group would be small, and none would go through the slots.
    monkeypatch.setattr(lane, "SMALL", 512)
    idle.clear()
    gc.collect()
    # What earlier tests have left (compilers' caches above all) would be looked through again at each of a cell's collections.
    gc.freeze()
    sim.reset()
    yield torch.device("npu:0")
    idle.clear()
    assert sim.hazards() == []
    sim.reset()
