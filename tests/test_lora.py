"""LoRA on offloaded models: each step of a user's session leaves the offloaded and the resident model equal, bit for bit."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("peft")

from tests import cells, sim, simulated
from tests.composed import adapters, models, scenes

SCENES = ("load_lora_weights", "zero LoRA", "fuse_lora", "add_adapter", "UNet LoRA")


def check(name: str, weights: str, mode: str, warm: bool) -> None:
    faults, refused = scenes.play(scenes.SCENES[name], weights, cells.MODES[mode], simulated.setting(), warm)
    assert faults == []
    assert set(refused) == scenes.QUANTISED.get((name, weights), set())


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("mode", "warm"), [("block", True), ("block+stream", False), ("leaf", False), ("leaf+stream+low", True)])
def test_plain_weights(name: str, mode: str, warm: bool, npu: torch.device) -> None:
    check(name, "plain", mode, warm)


@pytest.mark.parametrize(("name", "weights"), scenes.QUANTISED)
@pytest.mark.parametrize(("mode", "warm"), [("block+stream", True), ("leaf+stream", False)])
def test_quantised_weights(name: str, weights: str, mode: str, warm: bool, npu: torch.device) -> None:
    check(name, weights, mode, warm)


def test_loading_an_adapter_makes_no_new_slabs_for_the_weights(npu: torch.device) -> None:
    pipe = models.flux_pipeline()
    weights = pipe.transformer
    simulated.enable(weights, npu, cells.MODES["block+stream"])
    with torch.no_grad(), sim.xpu_shim():
        weights(**models.flux_inputs(npu))
        gc.collect()
        before, where = sim.counters(), weights.transformer_blocks[0].ff.net[2].weight.data_ptr()
        adapters.load("a", 1)(pipe)
        weights(**models.flux_inputs(npu))
    gc.collect()
    grown = sim.counters()["pinned_bytes"] - before["pinned_bytes"]
    adapter = sum(p.nbytes for name, p in weights.named_parameters() if "lora" in name)
    assert adapter <= grown <= 2 * adapter
    assert weights.transformer_blocks[0].ff.net[2].weight.data_ptr() == where
    # What an adapter took is given back with it.
    with sim.xpu_shim():
        pipe.unload_lora_weights()
        weights(**models.flux_inputs(npu))
    gc.collect()
    assert sim.counters()["pinned_bytes"] == before["pinned_bytes"]
