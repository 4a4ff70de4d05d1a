"""`.to()` of what is group-offloaded: the dtype is applied whatever stands beside it, and the device is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fresh import run
from torch import nn

import diffusers_offload_fix
from diffusers_offload_fix import _startup
from diffusers_offload_fix.removal import is_hooked
from tests import cells, sim, simulated, tiny
from tests.composed import adapters, models, scenes
from tests.kinds import contract
from tests.pairs import SORTS, WAYS, Pair, every
from tests.pipelines.builders import NAMED, modules
from tests.warned import Warned

HALF = torch.float16
REFUSED = "moving it"

#: What names a dtype: each call of a model's `to`, and whether it names a device as well.
CALLS: dict[str, tuple[Callable[[Any, torch.device], Any], bool]] = {
    "device, dtype": (lambda net, device: net.to(device, HALF), True),
    "string, dtype": (lambda net, device: net.to("npu:0", HALF), True),
    "number, dtype": (lambda net, device: net.to(0, HALF), True),
    "device, dtype, non_blocking": (lambda net, device: net.to(device, HALF, True), True),
    "device, keyword": (lambda net, device: net.to(device, dtype=HALF, non_blocking=True), True),
    "keywords": (lambda net, device: net.to(dtype=HALF, device=device), True),
    "keywords, a string": (lambda net, device: net.to(dtype=HALF, device="cpu"), True),
    "tensor": (lambda net, device: net.to(torch.empty(0, dtype=HALF, device=device)), True),
    "tensor on the host": (lambda net, device: net.to(tensor=torch.empty(0, dtype=HALF)), True),
    "no device": (lambda net, device: net.to(device=None, dtype=HALF), False),
    "None, dtype": (lambda net, device: net.to(None, HALF), False),
    "dtype": (lambda net, device: net.to(HALF, non_blocking=True), False),
}
#: What names no dtype.
MOVES: dict[str, Callable[[Any, torch.device], Any]] = {
    "device": lambda net, device: net.to(device),
    "string": lambda net, device: net.to("npu:1", non_blocking=True),
    "number": lambda net, device: net.to(1),
    "host": lambda net, device: net.to("cpu"),
    "keyword": lambda net, device: net.to(device=device, dtype=None),
    "device, None": lambda net, device: net.to(device, None),
    "tensor": lambda net, device: net.to(torch.empty(0, dtype=net.dtype, device=device)),
}


def warnings() -> Warned:
    """What diffusers and the plugin warn of."""
    return Warned("diffusers", "diffusers_offload_fix")


def forward(model: Any, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**models.flux_inputs(device, dtype=model.proj_out.weight.dtype), return_dict=False)[0]
    return output


def offloaded(device: torch.device, mode: str = "block+stream") -> Any:
    model = models.flux()
    simulated.enable(model, device, cells.MODES[mode])
    forward(model, device)
    return model


def is_modular_known() -> bool:
    import diffusers

    return hasattr(diffusers, "ModularPipeline")


def dtypes(module: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters()}


def refusals(lines: list[str]) -> int:
    return sum(REFUSED in line for line in lines)


@pytest.mark.parametrize("call", CALLS)
def test_the_dtype_is_applied_and_the_device_is_not(call: str, npu: torch.device) -> None:
    convert, has_device = CALLS[call]
    for mode in ("block+stream", "leaf"):
        resident, model = models.flux().to(npu, HALF), offloaded(npu, mode)
        with warnings() as lines:
            assert convert(model, npu) is model
        assert refusals(lines) == has_device
        assert sum("float32" in line for line in lines) <= 1
        for _ in range(2):
            assert dtypes(model) == {HALF} and contract.leaves_off(model, "cpu") == []
            sim.drain()
            sim.reset_counters()
            assert torch.equal(forward(model, npu), forward(resident, npu))
            sim.drain()
            assert sim.counters()["d2h_bytes"] == 0


@pytest.mark.parametrize("move", MOVES)
def test_a_device_alone_changes_nothing(move: str, npu: torch.device) -> None:
    resident, model = models.flux().to(npu), offloaded(npu)
    held = [(p, p.data_ptr(), p._version) for p in model.parameters()]
    with warnings() as lines:
        assert MOVES[move](model, npu) is model
    assert refusals(lines) == 1
    assert [(p, p.data_ptr(), p._version) for p in model.parameters()] == held
    assert torch.equal(forward(model, npu), forward(resident, npu))


@pytest.mark.parametrize("more", [{}, {"dtype": torch.float32}])
def test_the_memory_format_is_applied(more: dict[str, Any], npu: torch.device) -> None:
    resident, model = models.unet().to(npu), models.unet()
    simulated.enable(model, npu, cells.MODES["block+stream"])
    for net in (resident, model):
        net.to(npu, memory_format=torch.channels_last, **more)
    for _ in range(2):
        weight = model.conv_in.weight
        assert weight.is_contiguous(memory_format=torch.channels_last) and weight.device.type == "cpu"
        inputs = models.unet_inputs(npu, dtype=resident.dtype)
        with torch.no_grad():
            assert torch.equal(model(**inputs).sample, resident(**inputs).sample)


@pytest.mark.parametrize("call", [name for name, (_, has_device) in CALLS.items() if has_device])
def test_a_quantised_model_refuses_as_a_whole(call: str, npu: torch.device) -> None:
    model = offloaded(npu)
    model.is_quantized = True
    with warnings() as lines, pytest.raises(ValueError, match="Casting a quantized model"):
        CALLS[call][0](model, npu)
    assert refusals(lines) == 0 and dtypes(model) == {torch.bfloat16}
    with warnings() as lines:
        model.to(npu)
        model.to(npu, None)
    assert refusals(lines) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("npu", torch.int8), TypeError),
        (("npu", HALF, False, True), RuntimeError),
        (("nowhere", HALF), RuntimeError),
        ((object(),), TypeError),
    ],
)
def test_what_torch_refuses_changes_nothing(arguments: Any, error: type, npu: torch.device) -> None:
    model = offloaded(npu)
    for net in (models.flux(), model):
        with warnings() as lines, pytest.raises(error):
            net.to(*arguments)
    assert refusals(lines) == 0 and dtypes(model) == {torch.bfloat16}


def test_a_model_with_an_offloaded_part(npu: torch.device) -> None:
    model = models.flux()
    simulated.enable(model.transformer_blocks[0], npu, cells.MODES["leaf"])
    with warnings() as lines:
        model.to(npu, HALF)
    assert refusals(lines) == 1 and dtypes(model) == {HALF}
    assert contract.leaves_off(model, "cpu") == []


def test_a_model_that_is_not_offloaded_is_upstreams(npu: torch.device) -> None:
    model = models.flux()
    with warnings() as lines:
        assert model.to(npu, HALF) is model
    assert refusals(lines) == 0 and dtypes(model) == {HALF} and contract.leaves_off(model, npu) == []


@pytest.mark.parametrize("mode", ["block+stream", "leaf+stream", "leaf"])
def test_an_ip_adapter_takes_the_dtype_of_its_model(mode: str, npu: torch.device) -> None:
    scene = scenes.SCENES["IP-Adapter"]
    faults, refused = scenes.play(scene, "plain", cells.MODES[mode], simulated.setting(), warm=True)
    assert faults == [] and refused == []
    model = models.unet()
    simulated.enable(model, npu, cells.MODES[mode])
    adapters.load_ip_adapter(model)
    assert dtypes(model) == {torch.bfloat16}


#: What converts a pipeline to float16, and whether it names a device as well.
PIPELINE_CALLS: dict[str, tuple[Callable[[Any, torch.device], Any], bool]] = {
    "dtype": (lambda pipe, device: pipe.to(HALF), False),
    "keyword": (lambda pipe, device: pipe.to(dtype=HALF), False),
    "device, dtype": (lambda pipe, device: pipe.to(device, HALF), True),
    "string, keyword": (lambda pipe, device: pipe.to("npu", dtype=HALF), True),
    "keywords": (lambda pipe, device: pipe.to(device=device, dtype=HALF, silence_dtype_warnings=True), True),
}


@pytest.mark.parametrize("call", PIPELINE_CALLS)
@pytest.mark.parametrize("components", [("transformer",), ("transformer", "vae")])
def test_a_pipeline_converts_all_of_its_components(components: tuple[str, ...], call: str, npu: torch.device) -> None:
    convert, has_device = PIPELINE_CALLS[call]
    resident, pipe = tiny.build("plain"), tiny.build("plain")
    for name in components:
        simulated.enable(getattr(pipe, name), npu, cells.MODES["leaf+stream"])
    with sim.xpu_shim():
        resident.to(npu, HALF)
        with warnings() as lines:
            assert convert(pipe, npu) is pipe
    assert refusals(lines) == (len(components) if has_device else 0)
    for module in modules(pipe).values():
        assert dtypes(module) == {HALF}
        assert contract.leaves_off(module, "cpu" if is_hooked(module) or not has_device else npu) == []
    # Its inputs are of this dtype.
    with sim.xpu_shim():
        pipe.to(npu, torch.bfloat16)
        assert torch.equal(tiny.call(pipe, npu, 0), tiny.call(resident.to(torch.bfloat16), npu, 0))


def test_a_quantised_component_keeps_its_dtype(npu: torch.device) -> None:
    pipe = NAMED["sd3"].build()
    simulated.enable(pipe.transformer, npu, cells.MODES["leaf"])
    pipe.transformer.is_quantized = True
    with warnings() as lines:
        pipe.to(torch.bfloat16)
    assert [line for line in lines if "quantised" in line] == [
        f"{type(pipe.transformer).__name__} is quantised: its weights are not converted to torch.bfloat16."
    ]
    assert dtypes(pipe.transformer) == {torch.float32} and dtypes(pipe.vae) == {torch.bfloat16}


@pytest.mark.parametrize("call", PIPELINE_CALLS)
def test_a_modular_pipeline(call: str, npu: torch.device) -> None:
    if not is_modular_known():
        pytest.skip("this diffusers has no modular pipelines")
    from diffusers.modular_pipelines import ModularPipeline

    convert, has_device = PIPELINE_CALLS[call]
    pipe = ModularPipeline.__new__(ModularPipeline)
    parts = {"transformer": models.flux(), "text_encoder": models.text_encoder(), "vae": tiny.build("plain").vae}
    pipe.__dict__.update(parts, hf_device_map=None, _component_specs=dict.fromkeys(parts), _config_specs={})
    for name in ("transformer", "text_encoder"):
        simulated.enable(parts[name], npu, cells.MODES["leaf+stream"])
    with warnings() as lines:
        assert convert(pipe, npu) is pipe
    assert refusals(lines) == (2 if has_device else 0)
    for name, module in parts.items():
        assert dtypes(module) == {HALF}
        assert contract.leaves_off(module, npu if has_device and name == "vae" else "cpu") == []
    assert torch.equal(forward(parts["transformer"], npu), forward(models.flux().to(npu, HALF), npu))


def test_what_a_pipeline_refuses_changes_nothing(npu: torch.device) -> None:
    pipe = NAMED["sd3"].build()
    simulated.enable(pipe.transformer, npu, cells.MODES["leaf"])
    for arguments in ((HALF, npu), (npu, HALF, True)):
        with pytest.raises(ValueError, match="argument"):
            pipe.to(*arguments)
    assert dtypes(pipe.transformer) == {torch.float32} == dtypes(pipe.vae)


@pytest.mark.parametrize("mode", ["block+stream", "leaf", "leaf+stream+low"])
def test_a_text_encoder_of_transformers(mode: str, npu: torch.device) -> None:
    """Its `to` is torch's: it goes where it is sent until its next forward, after which it is offloaded as before."""
    resident, model = models.text_encoder().to(npu), models.text_encoder()
    simulated.enable(model, npu, cells.MODES[mode])
    inputs = models.text_inputs(npu)
    for arguments in ((npu,), ("npu:1",), ("cpu",), (npu, HALF), ("npu:1", torch.float32), (torch.bfloat16,)):
        model.to(*arguments)
        resident.to(npu, model.dtype)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(model(**inputs).last_hidden_state, resident(**inputs).last_hidden_state)
            assert contract.leaves_off(model, "cpu") == [] and dtypes(model) == dtypes(resident)


@every(("name", SORTS), ("way", WAYS[:2]))
def test_a_module_of_torch_comes_back(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    pair.check(1)
    for device in ("npu:0", "npu:1", "cpu"):
        pair.model.to(device)
        pair.check()


def test_upstream_drops_the_dtype(npu: torch.device) -> None:
    """What the plugin is for; and its methods go with it."""
    model, pipe = offloaded(npu), NAMED["sd3"].build()
    simulated.enable(pipe.transformer, npu, cells.MODES["leaf"])
    diffusers_offload_fix.deactivate()
    try:
        model.to(npu, HALF)
        pipe.to(HALF)
        assert dtypes(model) == {torch.bfloat16} and dtypes(pipe.transformer) == {torch.float32}
        model.to(torch.empty(0, dtype=torch.bfloat16, device=npu))
        assert contract.leaves_off(model, npu) == []
    finally:
        diffusers_offload_fix.activate()
    assert model.to(npu, HALF) is model and dtypes(model) == {HALF}


@pytest.mark.parametrize(
    ("name", "cls"), [(_startup.MODELS, "ModelMixin"), (_startup.PIPELINES, "DiffusionPipeline"), (_startup.MODULAR, "ModularPipeline")]
)
def test_the_evidence_is_the_same_of_live_classes(name: str, cls: str) -> None:
    run(f"""
    import diffusers_offload_fix
    from diffusers_offload_fix.fixes import all_fixes
    module = target()
    fixes = [fix for fix in all_fixes() if fix.id in ("dtype", "moved", "pipe", "mpipe")]
    assert len(fixes) == 4
    live = importlib.import_module("{name}")
    for _ in range(2):
        assert is_applied()
        assert all(fix.is_in_upstream(module) and not fix.probe(module) for fix in fixes)
        diffusers_offload_fix.deactivate()
        assert all(fix.probe(module) for fix in fixes)
        assert getattr(live, "{cls}").to.__module__ != "diffusers_offload_fix.conversion"
        diffusers_offload_fix.activate()
    """)
