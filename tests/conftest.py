"""The simulated accelerator for every test that asks for it, loaded before anything imports diffusers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests import sim

# The models are tiny: threads only get into each other's way, and two workers share the machine.
torch.set_num_threads(1)

if not os.environ.get("DIFFUSERS_OFFLOAD_FIX_TEST_GPU"):
    sim.load()


@pytest.fixture
def npu() -> Iterator[torch.device]:
    """The first simulated device, at rest before, and without any unordered use of memory afterwards."""
    import diffusers.hooks.group_offloading  # noqa: F401

    # Every cell collects garbage to see what is kept; what was there before it need not be walked each time.
    gc.collect()
    gc.freeze()
    sim.reset()
    yield torch.device("npu:0")
    assert sim.hazards() == []
    sim.reset()
