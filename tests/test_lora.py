"""LoRA on offloaded models: each step of a user's session leaves the offloaded and the resident model equal, bit for bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

from tests import cells, sim, simulated, tiny
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


def _adapter(pipe: Any) -> dict[str, torch.Tensor]:
    """A LoRA for the attention of the transformer, whose weights are no zeros."""
    found = {}
    generator = torch.Generator().manual_seed(3)
    for name, module in pipe.transformer.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("to_q", "to_v")):
            for part, shape in (("A", (2, module.in_features)), ("B", (module.out_features, 2))):
                found[f"transformer.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.1
    return found


@pytest.mark.parametrize("options", [{}, {"use_stream": True}], ids=["plain", "stream"])
def test_d3_a_lora_that_comes_is_fused_and_goes(options: dict[str, Any], npu: torch.device, tmp_path: Path) -> None:
    resident, pipe = tiny.build("plain"), tiny.build("plain")
    adapter = _adapter(pipe)
    resident.transformer.to(npu)
    resident.vae.to(npu)
    pipe.vae.to(npu)
    arguments = {"offload_type": "block_level", "num_blocks_per_group": 1, "offload_to_disk_path": str(tmp_path), **options}
    simulated.enable(pipe.transformer, npu, cells.Mode("disk", arguments))
    steps: list[Any] = [
        lambda pipe: pipe.load_lora_weights(dict(adapter), adapter_name="one"),
        lambda pipe: pipe.fuse_lora(lora_scale=0.5),
        lambda pipe: pipe.unfuse_lora(),
        lambda pipe: pipe.delete_adapters("one"),
        lambda pipe: pipe.unload_lora_weights(),
    ]
    images = [tiny.call(resident, npu)]
    assert torch.equal(tiny.call(pipe, npu), images[0])
    for step in steps:
        for each in (resident, pipe):
            with sim.xpu_shim():
                step(each)
        images.append(tiny.call(resident, npu))
        for _ in range(2):
            assert torch.equal(tiny.call(pipe, npu), images[-1])
    assert not torch.equal(images[0], images[1]) and not torch.equal(images[1], images[2])
    assert list(tmp_path.iterdir()) == []
