"""A weight that is used outside the forward that brings it: it comes as well, or the error says which one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from diffusers_offload_fix import disable_group_offload
from diffusers_offload_fix.borrowed import lent
from tests import sim
from tests.kinds import contract
from tests.pairs import live_bytes


class Reader(nn.Module):
    """A parent that reads its child's weight without running the child."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(functional.linear(x, self.proj.weight))


class Model(nn.Module):
    """A model that may run a piece of a block by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Reader(), Reader()])
        self.piece = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.piece:
            x = self.blocks[1].other(x)
        for block in self.blocks:
            x = block(x)
        return x


def enable(model: nn.Module, device: torch.device, **options: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    with sim.xpu_shim():
        apply_group_offloading(model, onload_device=device, num_blocks_per_group=1, **options)


def offloaded(device: torch.device, **options: Any) -> Model:
    model = Model().requires_grad_(False)
    enable(model, device, **options)
    return model


class Processor:
    """Reads a weight of the module that it works for, as attention processors may."""

    def __call__(self, reader: Reader, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, reader.proj.weight)


class Served(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(self, x)


class Both(Reader):
    """A parent that runs its child and reads its weight before and after."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(x, self.proj.weight)
        return functional.linear(self.proj(x), self.proj.weight, self.proj.bias)


class Attention(nn.Module):
    """torch's attention, which reads the weights of its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x)[0]
        return found


LEAF = {"offload_type": "leaf_level"}


@torch.no_grad()
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [Reader, Both, Attention])
def test_a_weight_that_a_parent_reads_comes_with_it(kind: type[nn.Module], stream: bool, npu: torch.device) -> None:
    torch.manual_seed(0)
    model = Model().requires_grad_(False).eval()
    model.blocks = nn.ModuleList([kind().requires_grad_(False).eval() for _ in range(2)])
    x = torch.ones(3, 8).to(npu)
    wanted = copy.deepcopy(model).to(npu)(x)
    before = live_bytes(npu)
    enable(model, npu, use_stream=stream, **LEAF)
    for _ in range(3):
        with sim.xpu_shim():
            assert torch.equal(model(x), wanted)
        assert contract.leaves_off(model, "cpu") == []
    assert live_bytes(npu) <= before
    assert sim.hazards() == []
    disable_group_offload(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_only_the_weight_itself_counts_as_read() -> None:
    class Asking(Reader):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x.to(self.proj.weight.dtype))

    assert list(lent(Asking())) == []
    reader = Reader()
    assert list(lent(reader)) == [reader.proj]


@torch.no_grad()
def test_a_weight_that_a_processor_reads(npu: torch.device) -> None:
    model = Model().requires_grad_(False)
    model.blocks[0] = Served().requires_grad_(False)
    enable(model, npu, use_stream=True, **LEAF)
    with pytest.raises(
        RuntimeError, match=r"proj\.weight of Model\.blocks\.0 \(Served\) was needed on npu:0[^$]*block_level"
    ) as caught:
        model(torch.ones(1, 8).to(npu))
    assert "same device" in str(caught.value)
    assert contract.leaves_off(model, "cpu") == []


@torch.no_grad()
@pytest.mark.parametrize("stream", [False, True])
def test_a_piece_of_a_block_that_is_run_by_itself(stream: bool, npu: torch.device) -> None:
    model = offloaded(npu, offload_type="block_level", use_stream=stream)
    model.piece = True
    with pytest.raises(RuntimeError, match=r"weight, bias of Model\.blocks\.1\.other \(Linear\) were needed on npu:0"):
        model(torch.ones(1, 8).to(npu))
    model.piece = False
    assert model(torch.ones(1, 8).to(npu)).device == npu


@torch.no_grad()
def test_other_errors_are_left_alone(npu: torch.device) -> None:
    model = offloaded(npu, offload_type="block_level")
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 7).to(npu))
    assert "Group offloading" not in str(caught.value)
