"""Other changes to offloaded models: modules that come, go and are replaced, weights that are assigned, copies."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import cells, simulated
from tests.composed import adapters, caching, models, scenes
from tests.kinds import contract

SCENES = [name for name in scenes.SCENES if "lora" not in name.lower() and name != "add_adapter"]


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("mode", "warm"), [("block2", True), ("block+stream", False), ("leaf", False), ("leaf+stream+low", True)])
def test_each_step_leaves_both_models_equal(name: str, mode: str, warm: bool, npu: torch.device) -> None:
    faults, refused = scenes.play(scenes.SCENES[name], "plain", cells.MODES[mode], simulated.setting(), warm)
    assert faults == [] and refused == []


def test_a_newcomer_has_a_group_of_its_own(npu: torch.device) -> None:
    model = models.flux()
    simulated.enable(model, npu, cells.MODES["leaf"])
    model.fuse_qkv_projections()
    most = max(sum(p.nbytes for p in module.parameters(recurse=False)) for module in model.modules())
    with torch.no_grad():
        model(**models.flux_inputs(npu))
        torch.get_device_module("npu").reset_peak_memory_stats()
        before = torch.get_device_module("npu").memory_allocated()
        model.transformer_blocks[0].attn.to_qkv(torch.ones(1, models.WIDTH, dtype=torch.bfloat16, device=npu))
    assert torch.get_device_module("npu").max_memory_allocated() - before < 2 * most


def test_a_block_more_and_a_block_less(npu: torch.device) -> None:
    resident, model = models.flux().to(npu), models.flux()
    simulated.enable(model, npu, cells.MODES["block+stream"])
    for change in (
        lambda net: net.transformer_blocks.append(models.flux(seed=3).transformer_blocks[0].to(net.device)),
        lambda net: net.transformer_blocks.__delitem__(0),
        lambda net: setattr(net, "transformer_blocks", torch.nn.ModuleList(list(net.transformer_blocks)[::-1])),
    ):
        for net in (resident, model):
            change(net)
        with torch.no_grad():
            for seed in range(2):
                inputs = models.flux_inputs(npu, seed)
                assert torch.equal(model(**inputs, return_dict=False)[0], resident(**inputs, return_dict=False)[0])
    assert contract.leaves_off(model, "cpu") == []


@pytest.mark.parametrize("mode", ["block+stream", "leaf"])
def test_a_copy_keeps_its_other_hooks_and_has_its_own_weights(mode: str, npu: torch.device) -> None:
    model = models.flux()
    model.enable_cache(caching.configs()["FirstBlockCache"]())
    simulated.enable(model, npu, cells.MODES[mode])
    wanted, _ = caching.loop(model, npu)
    twin = copy.deepcopy(model).to(npu)
    assert all(torch.equal(got, output) for got, output in zip(caching.loop(twin, npu)[0], wanted))
    edited = models.flux().to(npu)
    edited.enable_cache(caching.configs()["FirstBlockCache"]())
    for net in (twin, edited):
        adapters.double(net.proj_out)
    outputs = caching.loop(twin, npu)[0]
    assert all(torch.equal(got, output) for got, output in zip(outputs, caching.loop(edited, npu)[0]))
    assert not torch.equal(outputs[0], wanted[0])
    assert all(torch.equal(got, output) for got, output in zip(caching.loop(model, npu)[0], wanted))
