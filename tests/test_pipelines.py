"""Whole pipelines of real classes: the output of the resident one, bit for bit, and the life of their components."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import diffusers_offload_fix
from diffusers_offload_fix import disable_group_offload
from diffusers_offload_fix.unhook import hooks_below
from tests import sim
from tests.kinds import contract
from tests.pairs import live_bytes
from tests.pipelines.builders import NAMED, modules
from tests.pipelines.cells import MODES, Expected, Place, enable, faults, resident
from tests.warned import Warned

WEIGHTS = ("plain", "torchao-int8", "quanto-qint8")
TINY = NAMED["sd3"]


def place(device: torch.device) -> Place:
    return Place(device, lambda: int(torch.get_device_module("npu").memory_allocated(device)), sim.xpu_shim)


@functools.cache
def expected(name: str, weights: str) -> Expected:
    with sim.xpu_shim():
        return resident(NAMED[name], weights, place(torch.device("npu:0")))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMED)
def test_the_output_is_that_of_the_resident_pipeline(name: str, weights: str, mode: str, npu: torch.device) -> None:
    wanted = expected(name, weights)
    assert all(torch.isfinite(output).all() and output.std() > 1e-3 for output in wanted.outputs)
    assert faults(NAMED[name], weights, mode, place(npu), wanted) == []


def has_enable() -> bool:
    from diffusers import DiffusionPipeline

    return hasattr(DiffusionPipeline, "enable_group_offload")


def offloaded(device: torch.device, name: str = "sd3", mode: str = "block+stream", weights: str = "plain") -> Any:
    pipe = NAMED[name].build(weights)
    with sim.xpu_shim():
        enable(pipe, device, **MODES[mode])
    return pipe


def run(pipe: Any, device: torch.device, name: str = "sd3") -> torch.Tensor:
    with sim.xpu_shim():
        return NAMED[name].run(pipe, device)


def hooked(pipe: Any) -> list[str]:
    """The components that are group-offloaded."""
    return [name for name, module in modules(pipe).items() if any(True for _ in hooks_below(module))]


@pytest.mark.parametrize("mode", ("block+stream", "leaf"))
def test_a_component_that_is_not_supported_stays_resident(mode: str, npu: torch.device) -> None:
    if not has_enable():
        pytest.skip("this diffusers cannot offload a whole pipeline")
    pipe = TINY.build()
    pipe.vae._supports_group_offloading = False
    with Warned("diffusers_offload_fix") as lines, sim.xpu_shim():
        pipe.enable_group_offload(npu, **MODES[mode])
        pipe.enable_group_offload(npu, exclude_modules="vae", **MODES[mode])
    [line] = lines
    assert "vae (AutoencoderKL)" in line and "stay on npu:0" in line
    assert hooked(pipe) == ["transformer"]
    assert contract.leaves_off(pipe.vae, npu) == []
    assert torch.equal(run(pipe, npu), expected("sd3", "plain").outputs[0])


@pytest.mark.parametrize("was_offloaded", (True, False))
def test_a_call_that_raises_leaves_the_pipeline_as_it_was(was_offloaded: bool, npu: torch.device) -> None:
    if not has_enable():
        pytest.skip("this diffusers cannot offload a whole pipeline")
    pipe = offloaded(npu) if was_offloaded else TINY.build()

    def refuse(**_: Any) -> None:
        raise ValueError("no room for the autoencoder")

    for component in ("vae", "transformer"):
        getattr(pipe, component).enable_group_offload = refuse
        with pytest.raises(ValueError, match="no room"), sim.xpu_shim():
            pipe.enable_group_offload(npu, **MODES["leaf"])
        del getattr(pipe, component).__dict__["enable_group_offload"]
        assert sorted(hooked(pipe)) == (["transformer", "vae"] if was_offloaded else [])
        streams = [hook.group.stream for module in modules(pipe).values() for hook in hooks_below(module) if hook.group.modules]
        assert any(stream is not None for stream in streams) == was_offloaded
        assert all(contract.leaves_off(module, "cpu") == [] for module in modules(pipe).values())
    if not was_offloaded:
        pipe.to(npu)
    assert torch.equal(run(pipe, npu), expected("sd3", "plain").outputs[0])


def test_what_was_offloaded_and_is_excluded_now_is_resident(npu: torch.device) -> None:
    if not has_enable():
        pytest.skip("this diffusers cannot offload a whole pipeline")
    pipe = offloaded(npu)
    with sim.xpu_shim():
        pipe.enable_group_offload(npu, exclude_modules=["transformer"], **MODES["block"])
    assert hooked(pipe) == ["vae"]
    assert contract.leaves_off(pipe.transformer, npu) == []
    assert torch.equal(run(pipe, npu), expected("sd3", "plain").outputs[0])


def way_out(pipe: Any, how: str) -> None:
    if how == "function":
        disable_group_offload(pipe)
    else:
        pipe.remove_all_hooks()


@pytest.mark.parametrize("how", ("function", "method"))
@pytest.mark.parametrize("weights", ("plain", "torchao-int8", "quanto-qint8"))
def test_the_way_out_of_a_pipeline(weights: str, how: str, npu: torch.device) -> None:
    pipe = offloaded(npu, weights=weights)
    wanted = expected("sd3", weights).outputs[0]
    assert torch.equal(run(pipe, npu), wanted)
    way_out(pipe, how)
    assert hooked(pipe) == [] and sim.counters()["pinned_bytes"] == 0
    for module in modules(pipe).values():
        assert contract.leaves_off(module, "cpu") == []
        torch.nn.Module.to(module, npu)
    assert torch.equal(run(pipe, npu), wanted)
    way_out(pipe, how)
    with sim.xpu_shim():
        enable(pipe, npu, **MODES["leaf+stream"])
    assert torch.equal(run(pipe, npu), wanted)


@pytest.mark.parametrize("how", ("enable_model_cpu_offload", "enable_sequential_cpu_offload"))
def test_another_offloading_afterwards(how: str, npu: torch.device) -> None:
    pipe = offloaded(npu)
    with pytest.raises(ValueError, match="group offload"):
        getattr(pipe, how)(device=npu)
    pipe.remove_all_hooks()
    getattr(pipe, how)(device=npu)
    assert torch.equal(run(pipe, npu), expected("sd3", "plain").outputs[0])
    # And back: what accelerate added goes with the same call.
    pipe.remove_all_hooks()
    if how == "enable_model_cpu_offload":
        with sim.xpu_shim():
            enable(pipe, npu, **MODES["block"])
        assert torch.equal(run(pipe, npu), expected("sd3", "plain").outputs[0])


def test_saving_afterwards(npu: torch.device, tmp_path: Path) -> None:
    pipe = offloaded(npu)
    run(pipe, npu)
    pipe.remove_all_hooks()
    pipe.transformer.save_pretrained(tmp_path)
    again = type(pipe.transformer).from_pretrained(tmp_path)
    assert contract.same_state_dict_bytes(again.state_dict(), TINY.build().transformer.state_dict()) == []


@pytest.mark.parametrize("mode", ("block", "leaf+stream"))
def test_a_component_of_two_pipelines(mode: str, npu: torch.device) -> None:
    one = offloaded(npu)
    other = type(one)(**one.components)
    other.set_progress_bar_config(disable=True)
    with sim.xpu_shim():
        enable(other, npu, **MODES[mode])
    wanted = expected("sd3", "plain").outputs[0]
    for _ in range(2):
        assert torch.equal(run(one, npu), wanted)
        assert torch.equal(run(other, npu), wanted)
    disable_group_offload(one)
    disable_group_offload(other)
    assert hooked(other) == [] and sim.counters()["pinned_bytes"] == 0
    other.to(npu)
    assert torch.equal(run(one, npu), wanted)


def no_thread_is_left() -> bool:
    """True once every thread of the plugin has ended, which takes them a moment after the last forward."""
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("offload") for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("mode", ("block+stream+low", "leaf+stream"))
def test_nothing_outlives_a_pipeline(mode: str, npu: torch.device) -> None:
    expected("sd3", "plain")
    before = live_bytes(npu)
    pipe = offloaded(npu, mode=mode)
    run(pipe, npu)
    assert no_thread_is_left()
    del pipe
    gc.collect()
    assert live_bytes(npu) <= before
    assert sim.counters()["pinned_bytes"] == 0


def test_pipelines_are_left_as_they_were_when_the_plugin_goes() -> None:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    ours = DiffusionPipeline.remove_all_hooks
    diffusers_offload_fix.deactivate()
    try:
        assert DiffusionPipeline.remove_all_hooks.__module__ == "diffusers.pipelines.pipeline_utils"
    finally:
        diffusers_offload_fix.activate()
    assert ours.__module__ == DiffusionPipeline.remove_all_hooks.__module__ == "diffusers_offload_fix.pipelines"


def resident_set() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_cycles_of_enable_run_disable_cost_nothing(npu: torch.device) -> None:
    """DIFFUSERS_OFFLOAD_FIX_CYCLES asks for more of them: `nox -s cycles` runs 50."""
    cycles = int(os.environ.get("DIFFUSERS_OFFLOAD_FIX_CYCLES", "12"))
    pipe = TINY.build()
    wanted = expected("sd3", "plain")
    modes = ("block+stream", "leaf+stream", "block+stream+low", "block")
    before = live_bytes(npu) + wanted.kept
    ballast = [torch.zeros(2**21) for _ in modules(pipe)]
    for module, numbers in zip(modules(pipe).values(), ballast):
        # Large enough that one slab which is kept would show in the process's memory.
        module.register_buffer("ballast", numbers)
    sizes = []
    for cycle in range(cycles):
        with sim.xpu_shim():
            enable(pipe, npu, **MODES[modes[cycle % len(modes)]])
        assert torch.equal(run(pipe, npu), wanted.outputs[0])
        disable_group_offload(pipe)
        assert live_bytes(npu) <= before
        assert sim.counters()["pinned_bytes"] == 0
        sizes.append(resident_set())
    assert no_thread_is_left()
    # Half of the cycles warm up. Slabs that were kept would cost 16 MiB a cycle; the allocator's own ups and downs are about 20.
    assert sizes[-1] - sizes[cycles // 2] < 40 * 2**20
