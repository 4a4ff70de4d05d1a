"""What the tests of the simulator share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import sim


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    """The simulator at rest before and after each test of a module that imports this."""
    sim.reset()
    torch.get_device_module("npu").set_device(0)
    yield
    sim.reset()


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def on_side(host: torch.Tensor, stream: torch.Stream, device: str = "npu:0") -> torch.Tensor:
    """A copy that is queued on a stream of its own."""
    with torch.get_device_module("npu").stream(stream):
        return host.to(device, non_blocking=True)
