"""Caches on offloaded models: whatever was enabled first, outputs are those of a resident model, and a skipped block is not copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from tests import cells, sim, simulated
from tests.composed import caching, models
from tests.kinds import contract

ORDERS = ("cache offload", "offload cache", "offload run cache", "offload cache lora", "cache lora offload")


def build(cache: str, order: str, mode: str, device: torch.device) -> tuple[Any, Any]:
    """A resident and an offloaded model for which everything in `order` was done."""
    resident, model = models.flux(blocks=3).to(device), models.flux(blocks=3)
    for what in order.split():
        if what == "offload":
            simulated.enable(model, device, cells.MODES[mode])
        for net in (resident, model):
            if what == "cache":
                net.enable_cache(caching.configs()[cache]())
            elif what == "lora":
                with sim.xpu_shim():
                    caching.add_lora(net)
            elif what == "run":
                with torch.no_grad():
                    net(**models.flux_inputs(device))
    return resident, model


@pytest.mark.parametrize("cache", caching.configs())
@pytest.mark.parametrize(
    ("order", "mode"),
    [(order, mode) for order, mode in zip(ORDERS, ("block", "block+stream", "leaf+stream", "block+stream", "leaf+stream+low"))],
)
def test_outputs_are_those_of_the_resident_model(cache: str, order: str, mode: str, npu: torch.device) -> None:
    resident, model = build(cache, order, mode, npu)
    for _ in range(2):
        wanted, got = caching.loop(resident, npu)[0], caching.loop(model, npu)[0]
        assert [torch.equal(a, b) for a, b in zip(got, wanted)] == [True] * caching.STEPS
    # The cache is at work: without it some of these would be other images.
    for net in (resident, model):
        net.disable_cache()
    plain = caching.loop(resident, npu)[0]
    assert [torch.equal(a, b) for a, b in zip(caching.loop(model, npu)[0], plain)] == [True] * caching.STEPS
    assert not all(torch.equal(a, b) for a, b in zip(plain, wanted))
    assert contract.leaves_off(model, "cpu") == []


@pytest.mark.parametrize("order", ["cache offload", "offload cache", "offload cache lora"])
@pytest.mark.parametrize("mode", ["block", "block+stream", "leaf+stream"])
def test_a_skipped_block_costs_no_transfer(order: str, mode: str, npu: torch.device) -> None:
    _, model = build("FirstBlockCache", order, mode, npu)

    def copied() -> int:
        sim.drain()
        nbytes = sim.counters()["h2d_bytes"]
        sim.reset_counters()
        return nbytes

    caching.loop(model, npu)
    copied()
    _, nbytes = caching.loop(model, npu, copied)
    skippable = [*model.transformer_blocks[1:], *model.single_transformer_blocks]
    saved = sum(p.nbytes for block in skippable for p in block.parameters())
    # Computed in the first step and when the input changes; one wrong guess of the prefetcher after each.
    assert nbytes[0] >= saved and nbytes[4] >= saved
    assert max(nbytes[2], nbytes[3]) <= nbytes[0] - saved
