"""What the matrix leaves out: `block_modules`, `exclude_kwargs`, other places than the CPU, and other hooks beside group offloading."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import nn

import diffusers_offload_fix  # noqa: F401
from diffusers_offload_fix import homes, lane, staging, transfer
from tests import sim
from tests.kinds import contract
from tests.kinds.models import Stack, fill, make_input


class Nested(nn.Module):
    """A model whose blocks sit in two children, as an autoencoder's do."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 64
        self.encoder = Stack()
        self.decoder = Stack()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor] | None = None) -> torch.Tensor:
        x = self.encoder(x) * self.scale
        if seen is not None:
            seen.append(x)
        return self.decoder(x)


def pair(device: torch.device) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A resident model, the same one on the host, and an input on the device."""
    models = []
    for _ in range(2):
        model = Nested()
        fill(model, 0)
        models.append(model.eval().requires_grad_(False))
    return models[0].to(device), models[1], make_input(models[1], 64, device=device)


def enable(model: nn.Module, device: torch.device, **arguments: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    for name in ("block_modules", "exclude_kwargs"):
        if name in arguments and name not in inspect.signature(apply_group_offloading).parameters:
            pytest.skip(f"this diffusers has no {name}")
    with sim.xpu_shim():
        apply_group_offloading(model, onload_device=device, **arguments)


STREAMS = ({}, {"use_stream": True}, {"use_stream": True, "low_cpu_mem_usage": True})


@pytest.mark.parametrize("flags", STREAMS, ids=str)
def test_block_modules(flags: dict[str, Any], npu: torch.device) -> None:
    expected, model, example = pair(npu)
    before = torch.get_device_module("npu").memory_allocated(npu)
    arguments = {"offload_type": "block_level", "num_blocks_per_group": 1, "block_modules": ["encoder", "decoder"]}
    enable(model, npu, **arguments, **flags)
    peaks = []
    for _ in range(3):
        torch.get_device_module("npu").reset_peak_memory_stats(npu)
        with torch.no_grad(), sim.xpu_shim():
            assert torch.equal(model(example), expected(example))
        peaks.append(torch.get_device_module("npu").max_memory_allocated(npu) - before)
        assert contract.leaves_off(model, "cpu") == []
    weights = sum(p.nbytes for p in model.parameters())
    assert max(peaks) < weights
    assert torch.get_device_module("npu").memory_allocated(npu) == before


@pytest.mark.parametrize("flags", STREAMS, ids=str)
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_exclude_kwargs(level: str, flags: dict[str, Any], npu: torch.device) -> None:
    expected, model, example = pair(npu)
    enable(model, npu, offload_type=level, num_blocks_per_group=1, exclude_kwargs=["seen"], **flags)
    for _ in range(2):
        seen: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        with torch.no_grad(), sim.xpu_shim():
            assert torch.equal(model(example, seen=seen), expected(example, seen=wanted))
        # A list that is sent to the device is copied; one that is left out is the caller's own, with what forward put in.
        assert len(seen) == 1
        assert torch.equal(seen[0], wanted[0])


@pytest.mark.parametrize("flags", ({}, {"use_stream": True}), ids=str)
def test_offload_to_the_second_device(flags: dict[str, Any], npu: torch.device) -> None:
    expected, model, example = pair(npu)
    other = torch.device("npu:1")
    enable(model, npu, offload_device=other, offload_type="block_level", num_blocks_per_group=1, **flags)
    for _ in range(3):
        with torch.no_grad(), sim.xpu_shim():
            assert torch.equal(model(example), expected(example))
        assert contract.leaves_off(model, other) == []


@pytest.mark.parametrize("flags", ({}, {"non_blocking": True}), ids=str)
def test_where_there_is_nowhere_to_move_to(flags: dict[str, Any], npu: torch.device) -> None:
    """On a machine without an accelerator both devices are the CPU: the weights stay what they are."""
    expected, model, example = pair(npu)
    addresses = [p.data_ptr() for p in model.parameters()]
    enable(model, torch.device("cpu"), offload_type="leaf_level", **flags)
    with torch.no_grad():
        assert torch.equal(model(example.cpu()), expected.cpu()(example.cpu()))
    assert [p.data_ptr() for p in model.parameters()] == addresses


def halving() -> Any:
    """A hook with a forward of its own, as a cache has: it halves the output and counts its calls."""
    from diffusers.hooks.hooks import ModelHook

    class Halving(ModelHook):  # type: ignore[misc]
        calls = 0

        def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.fn_ref.original_forward(*args, **kwargs) / 2

    return Halving()


ARGUMENTS = {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True}


def run(model: nn.Module, example: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), sim.xpu_shim():
        output: torch.Tensor = model(example)
    return output


def test_a_hook_below_is_removed_and_stays_away(npu: torch.device) -> None:
    from diffusers.hooks.hooks import HookRegistry

    expected, model, example = pair(npu)
    wanted = run(expected, example)
    block = model.encoder.blocks[1]
    registry = HookRegistry.check_if_exists_or_initialize(block)
    hook = halving()
    registry.register_hook(hook, "halving")
    enable(model.encoder, npu, **ARGUMENTS)
    enable(model.decoder, npu, **ARGUMENTS)
    model.scale.data = model.scale.data.to(npu)
    assert not torch.equal(run(model, example), wanted)
    registry.remove_hook("halving", recurse=False)
    assert torch.equal(run(model, example), wanted)
    calls = hook.calls
    registry.remove_hook("group_offloading", recurse=False)
    block.to(npu)
    assert torch.equal(run(model, example), wanted)
    assert hook.calls == calls


def test_a_hook_above_stays_connected_when_offloading_is_applied_anew(npu: torch.device) -> None:
    from diffusers.hooks.hooks import HookRegistry

    _, model, example = pair(npu)
    enable(model, npu, **ARGUMENTS, block_modules=["encoder", "decoder"])
    hook = halving()
    block = model.encoder.blocks[1]
    registry = HookRegistry.check_if_exists_or_initialize(block)
    registry.register_hook(hook, "halving")
    halved = run(model, example)
    assert hook.calls == 1
    registry.remove_hook("group_offloading", recurse=False)
    block.to(npu)
    assert torch.equal(run(model, example), halved)
    assert hook.calls == 2


class Guest(nn.Module):
    """A block that calls a model which is no part of it, as a pipeline's parts call each other."""

    def __init__(self, block: nn.Module, others: list[nn.Module]) -> None:
        super().__init__()
        self.block = block
        self.others = others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for other in self.others:
            x = x + other(x)
        return self.block(x)


@pytest.mark.parametrize("flags", STREAMS, ids=str)
def test_a_model_that_runs_inside_another(flags: dict[str, Any], npu: torch.device) -> None:
    expected, model, example = pair(npu)
    expected_inner, inner, _ = pair(npu)
    expected.encoder.blocks[1] = Guest(expected.encoder.blocks[1], [expected_inner])
    model.encoder.blocks[1] = Guest(model.encoder.blocks[1], [inner])
    for part in (model, inner):
        enable(part, npu, offload_type="block_level", num_blocks_per_group=1, block_modules=["encoder", "decoder"], **flags)
    for _ in range(3):
        assert torch.equal(run(model, example), run(expected, example))
        assert contract.leaves_off(model, "cpu") + contract.leaves_off(inner, "cpu") == []


@pytest.mark.parametrize("flags", STREAMS, ids=str)
def test_two_models_in_two_threads(flags: dict[str, Any], npu: torch.device) -> None:
    expected, one, example = pair(npu)
    _, two, _ = pair(npu)
    wanted = run(expected, example)
    for part in (one, two):
        enable(part, npu, offload_type="leaf_level", **flags)
    wrong: list[Any] = []

    def work(model: nn.Module) -> None:
        with torch.no_grad():
            wrong.extend(index for index in range(6) if not torch.equal(model(example), wanted))

    with sim.xpu_shim():
        threads = [threading.Thread(target=work, args=(part,)) for part in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert contract.leaves_off(one, "cpu") + contract.leaves_off(two, "cpu") == []


@pytest.mark.parametrize("flags", STREAMS, ids=str)
def test_copies_that_fail_cost_one_forward_only(flags: dict[str, Any], npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model, example = pair(npu)
    enable(model, npu, offload_type="block_level", num_blocks_per_group=1, block_modules=["encoder", "decoder"], **flags)
    wanted = run(expected, example)
    assert torch.equal(run(model, example), wanted)
    before = torch.get_device_module("npu").memory_allocated(npu)
    copies: list[int] = []

    def fails_after_two(original: Any) -> Any:
        def copy(*arguments: Any, **more: Any) -> Any:
            copies.append(1)
            if len(copies) > 2:
                raise OSError("the bus is gone")
            return original(*arguments, **more)

        return copy

    with monkeypatch.context() as patch:
        for owner, name in ((homes.Home, "copy_to"), (staging.Ring, "send")):
            patch.setattr(owner, name, fails_after_two(getattr(owner, name)))
        patch.setattr(transfer, "SMALL", 0)
        patch.setattr(lane, "SMALL", 0)
        with pytest.raises(OSError, match="the bus is gone"):
            run(model, example)
    assert contract.leaves_off(model, "cpu") == []
    assert torch.get_device_module("npu").memory_allocated(npu) == before
    for _ in range(2):
        assert torch.equal(run(model, example), wanted)
