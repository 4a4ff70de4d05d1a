"""Block level for models whose blocks lie deeper than one module, and for parts that are run without the model's forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import diffusers_offload_fix  # noqa: F401
from diffusers_offload_fix import blocks, disable_group_offload
from tests import sim
from tests.kinds import contract
from tests.pairs import live_bytes
from tests.pipelines import autoencoders, encoders
from tests.pipelines.cells import MODES
from tests.pipelines.weights import weight_bytes

#: Autoencoders whose parts are put together differently.
SOME = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLWan", "AutoencoderKLLTXVideo")
USES = (autoencoders.round_trip, autoencoders.tiled, autoencoders.sliced, autoencoders.one_by_one)


def enable(model: nn.Module, device: torch.device, **options: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    with sim.xpu_shim():
        apply_group_offloading(model, onload_device=device, **options)


def outputs(model: nn.Module, example: torch.Tensor) -> dict[Any, torch.Tensor]:
    """What the resident model makes, for each use that it knows: tiles and slices came later to some."""
    found = {}
    for use in USES:
        try:
            found[use] = use(model, example)
        except (AttributeError, NotImplementedError):
            assert use is not autoencoders.round_trip
    return found


@torch.no_grad()
@pytest.mark.parametrize("mode", ("block", "block+stream", "leaf+stream"))
@pytest.mark.parametrize("name", SOME)
def test_an_autoencoder(name: str, mode: str, npu: torch.device) -> None:
    kind = autoencoders.NAMED[name]
    if not kind.exists():
        pytest.skip(f"this diffusers has no {name}")
    resident, example = kind.build().to(npu), kind.example().to(npu)
    wanted = outputs(resident, example)
    model = kind.build()
    before = live_bytes(npu)
    enable(model, npu, **MODES[mode])
    for _ in range(2):
        for use, output in wanted.items():
            with sim.xpu_shim():
                assert torch.equal(use(model, example), output), use.__name__
            assert contract.leaves_off(model, "cpu") == []
            assert live_bytes(npu) <= before, use.__name__
    assert sim.hazards() == []


@torch.no_grad()
def test_an_autoencoder_saves_memory(npu: torch.device) -> None:
    kind = autoencoders.Autoencoder(
        "AutoencoderKL", {**autoencoders.NAMED["AutoencoderKL"].config, "block_out_channels": (64, 64)}, (1, 3, 8, 8)
    )
    for mode, most in (("block", 0.5), ("block+stream", 0.7)):
        model, example = kind.build(), kind.example().to(npu)
        enable(model, npu, **MODES[mode])
        before = live_bytes(npu)
        torch.get_device_module("npu").reset_peak_memory_stats(npu)
        with sim.xpu_shim():
            autoencoders.round_trip(model, example)
        assert torch.get_device_module("npu").max_memory_allocated(npu) - before < most * weight_bytes(model)


@torch.no_grad()
@pytest.mark.parametrize("mode", ("block", "block+stream"))
@pytest.mark.parametrize("name", list(encoders.NAMED))
def test_a_text_encoder(name: str, mode: str, npu: torch.device) -> None:
    kind = encoders.NAMED[name]
    tokens = encoders.ids(npu)
    wanted = kind.use(kind.build().to(npu), tokens)
    model = kind.build()
    enable(model, npu, **MODES[mode])
    before = live_bytes(npu)
    for _ in range(2):
        torch.get_device_module("npu").reset_peak_memory_stats(npu)
        with sim.xpu_shim():
            output = kind.use(model, tokens)
        peak = torch.get_device_module("npu").max_memory_allocated(npu) - before
        assert torch.equal(output, wanted)
        del output
        assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
        # Qwen-VL keeps a few numbers of the last prompt for itself.
        assert live_bytes(npu) <= before + 8
    # Four layers and the rest: one layer at a time, or two with streams. One group of everything would be the whole.
    assert peak < (0.6 if mode == "block" else 0.8) * weight_bytes(model)
    assert sim.hazards() == []


@torch.no_grad()
def test_what_is_left_on_the_device_does_not_grow_with_depth(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "LAYERS", 24)
    kind = encoders.NAMED["t5"]
    model = kind.build()
    enable(model, npu, **MODES["block+stream"])
    before = live_bytes(npu)
    torch.get_device_module("npu").reset_peak_memory_stats(npu)
    with sim.xpu_shim():
        kind.use(model, encoders.ids(npu))
    assert torch.get_device_module("npu").max_memory_allocated(npu) - before < 0.17 * weight_bytes(model)


class Part(nn.Module):
    """A part with blocks, whose own tensor is used by whoever has it too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))
        self.before = nn.Linear(width, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.by_name = nn.ModuleDict({"after": nn.Linear(width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x + self.bias)
        for layer in self.layers:
            x = layer(x)
        return self.by_name["after"](x)


class Whole(nn.Module):
    """Two parts, of which one hangs deep, and something small beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.wrapper = nn.ModuleDict({"inner": Part()})
        self.part = Part()
        self.spare: Any = nn.ModuleList([nn.Linear(8, 8), None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapper["inner"](self.small(x)) * self.part.bias + self.part(x)


def whole() -> Whole:
    torch.manual_seed(0)
    return Whole().requires_grad_(False)


def test_the_plan() -> None:
    plan = blocks.plan(whole(), 2)
    assert [name for name, _ in plan.groups] == ["small_0_1", "spare_0_0"]
    assert [part.name for part in plan.all_parts()] == ["wrapper", "wrapper.inner", "part"]
    part = plan.parts[-1]
    assert [name for name, _ in part.groups] == ["part.layers_0_1", "part.layers_2_2"]
    assert [type(module).__name__ for module in part.rest] == ["Linear", "ModuleDict"]
    assert plan.rest == []
    named = blocks.plan(whole(), 1, ["small"])
    assert [part.name for part in named.parts] == ["small", "wrapper", "part"]


@torch.no_grad()
@pytest.mark.parametrize("mode", ("block", "block+stream", "block+stream+low"))
def test_parts_that_are_run_by_themselves(mode: str, npu: torch.device) -> None:
    resident, model = whole().to(npu), whole()
    example = torch.randn(2, 8).to(npu)
    before = live_bytes(npu)
    enable(model, npu, **MODES[mode])
    runs = (
        lambda m: m(example),
        lambda m: m.part(example),
        lambda m: m.part.before(example),
        lambda m: m.part.by_name["after"](example),
        lambda m: m.part.layers[1](example),
        lambda m: m.wrapper["inner"].before(example),
        lambda m: m.small(example) if isinstance(m.small, nn.Sequential) else example,
    )
    for _ in range(2):
        for run in runs:
            with sim.xpu_shim():
                got, wanted = run(model), run(resident)
            assert torch.equal(got, wanted)
            del got, wanted
            assert contract.leaves_off(model, "cpu") == []
    with sim.xpu_shim():
        model(example)
    assert live_bytes(npu) <= before
    # Inputs on the host follow, as they do into a forward.
    with sim.xpu_shim():
        assert torch.equal(model.part.before(example.cpu()), resident.part.before(example))


@torch.no_grad()
@pytest.mark.parametrize("mode", ("block", "block+stream"))
def test_a_part_that_raises_lets_go_of_its_group(mode: str, npu: torch.device) -> None:
    model = whole()
    enable(model, npu, **MODES[mode])
    before = live_bytes(npu)
    with pytest.raises(RuntimeError), sim.xpu_shim():
        model.part.before(torch.randn(2, 3).to(npu))
    assert contract.leaves_off(model, "cpu") == []
    kind = autoencoders.NAMED["AutoencoderKL"]
    vae = kind.build()
    enable(vae, npu, **MODES[mode])
    with pytest.raises(RuntimeError), sim.xpu_shim():
        vae.decode(torch.randn(1, 3, 8, 8).to(npu))
    assert contract.leaves_off(vae, "cpu") == []
    assert live_bytes(npu) <= before


@pytest.mark.parametrize("mode", ("block", "block+stream"))
def test_gradients_through_a_part_are_those_of_the_resident_model(mode: str, npu: torch.device) -> None:
    kind = autoencoders.NAMED["AutoencoderKL"]
    resident, model = kind.build().to(npu), kind.build()
    enable(model, npu, **MODES[mode])

    def gradient(net: Any, run: Any) -> torch.Tensor:
        example = kind.example().to(npu).requires_grad_()
        run(net, example).sum().backward()
        assert example.grad is not None
        return example.grad

    for run in (lambda net, x: net.encode(x).latent_dist.mode(), lambda net, x: net.encoder.conv_in(x)):
        assert torch.equal(gradient(model, run), gradient(resident, run))
        assert contract.leaves_off(model, "cpu") == []


@torch.no_grad()
def test_a_copy_of_an_autoencoder_is_its_own_model(npu: torch.device) -> None:
    kind = autoencoders.NAMED["AutoencoderKL"]
    model = kind.build()
    enable(model, npu, **MODES["block+stream"])
    twin = copy.deepcopy(model)
    twin.quant_conv.weight.mul_(2)
    changed = kind.build().to(npu)
    changed.quant_conv.weight.mul_(2)
    example = kind.example().to(npu)
    assert torch.equal(twin.to(npu).encode(example).latent_dist.mode(), changed.encode(example).latent_dist.mode())
    assert torch.equal(model.encode(example).latent_dist.mode(), kind.build().to(npu).encode(example).latent_dist.mode())
    disable_group_offload(model)
    assert "encode" not in model.__dict__ and not model.quant_conv._forward_hooks
