"""Training an adapter on frozen, offloaded weights: gradients of the resident model, bit for bit, and less device memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from tests import cells, sim, simulated
from tests.composed import models, training
from tests.kinds import KINDS, contract

WEIGHTS = ("plain", "torchao-int8", "quanto-qint8")
COMBINATIONS = [
    ("plain", "block", "none"),
    ("plain", "block2", "non-reentrant"),
    ("plain", "block+stream", "none"),
    ("plain", "block+stream", "non-reentrant"),
    ("plain", "block+stream", "reentrant"),
    ("plain", "leaf+stream", "non-reentrant"),
    ("plain", "leaf", "reentrant"),
    ("plain", "leaf+stream+low", "none"),
    ("torchao-int8", "block+stream", "none"),
    ("torchao-int8", "leaf+stream", "non-reentrant"),
    ("quanto-qint8", "block+stream", "non-reentrant"),
    ("quanto-qint8", "leaf+stream", "none"),
]


def pair(weights: str, mode: str, checkpointing: str, device: torch.device, blocks: int = 2) -> tuple[Any, Any]:
    resident, model = (training.build(weights, checkpointing, blocks) for _ in range(2))
    resident.to(device)
    simulated.enable(model, device, cells.MODES[mode])
    return resident, model


@pytest.mark.parametrize(("weights", "mode", "checkpointing"), COMBINATIONS)
def test_gradients_are_those_of_the_resident_model(weights: str, mode: str, checkpointing: str, npu: torch.device) -> None:
    models_ = pair(weights, mode, checkpointing, npu)
    optimisers = [torch.optim.SGD(training.trainable(model).values(), lr=0.05) for model in models_]
    for step in range(2):
        assert training.backward(models_[1], npu, step) == training.backward(models_[0], npu, step)
        wanted, got = map(training.trainable, models_)
        assert wanted.keys() == got.keys()
        for name, parameter in got.items():
            assert parameter.device.type == parameter.grad.device.type == "cpu", name
            assert torch.equal(parameter.grad, wanted[name].grad.cpu()), name
        assert any(parameter.grad.abs().sum() for parameter in got.values())
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    assert contract.leaves_off(models_[1], "cpu") == []
    with torch.no_grad():
        outputs = [model(**models.flux_inputs(npu), return_dict=False)[0] for model in models_]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("mode", ["block+stream", "leaf+stream", "block"])
@pytest.mark.parametrize("checkpointing", training.CHECKPOINTS)
def test_memory_is_saved(mode: str, checkpointing: str, npu: torch.device) -> None:
    peaks = []
    for model in pair("plain", mode, checkpointing, npu, blocks=6):
        device = torch.get_device_module("npu")
        gc.collect()
        weights = sum(p.nbytes for p in model.parameters() if p.device == npu)
        training.backward(model, npu)
        gc.collect()
        device.reset_peak_memory_stats()
        before = device.memory_allocated()
        training.backward(model, npu)
        peaks.append(weights + device.max_memory_allocated() - before)
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        assert device.memory_allocated() <= before
    size = sum(p.nbytes for p in model.parameters())
    # What is left of the weights: the root's, two groups of the forward and the backward pass, and one that is copied.
    assert peaks[0] - peaks[1] > size / 2


def test_nothing_is_left_on_the_device(npu: torch.device) -> None:
    model = training.build(checkpointing="non-reentrant")
    simulated.enable(model, npu, cells.MODES["leaf+stream"])
    gc.collect()
    before = torch.get_device_module("npu").memory_allocated()
    training.backward(model, npu)
    gc.collect()
    assert torch.get_device_module("npu").memory_allocated() == before
    with pytest.raises(ZeroDivisionError):
        value = training.loss(model, npu)
        value.register_hook(lambda gradient: 1 / 0)
        value.backward()
    del value
    gc.collect()
    assert torch.get_device_module("npu").memory_allocated() == before
    assert training.backward(model, npu) == training.backward(training.build().to(npu), npu)


def test_a_weight_that_changed_since_the_forward_pass_is_an_error(npu: torch.device) -> None:
    model = training.build()
    simulated.enable(model, npu, cells.MODES["block+stream"])
    value = training.loss(model, npu)
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_out[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        value.backward()
    value = training.loss(model, npu)
    model.transformer_blocks[0].attn.to_out[0].weight.data = torch.ones(models.WIDTH, models.WIDTH, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="tensors were replaced"):
        value.backward()


def test_other_hooks_for_saved_tensors_see_what_is_not_a_weight(npu: torch.device) -> None:
    resident, model = pair("plain", "block+stream", "none", npu)
    with torch.autograd.graph.save_on_cpu():
        values = [training.loss(net, npu) for net in (resident, model)]
    for value in values:
        value.backward()
    wanted, got = training.trainable(resident), training.trainable(model)
    assert all(torch.equal(parameter.grad, wanted[name].grad.cpu()) for name, parameter in got.items())


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8"])
def test_what_cannot_be_supported_is_refused_before_the_step(name: str, npu: torch.device) -> None:
    kind = KINDS[name]
    if kind.runs(npu) is not None:
        pytest.skip(kind.runs(npu))
    model, example = kind.build("cpu")
    simulated.enable(model, npu, cells.MODES["block+stream"])
    output = model(example.to(npu).requires_grad_())
    with pytest.raises(RuntimeError, match=r"does not support it: .*tensors that autograd does not see"):
        output.float().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert contract.leaves_off(model, "cpu") == []
    assert sim.pending() == 0
