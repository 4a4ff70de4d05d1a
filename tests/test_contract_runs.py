"""Circumstances of a run: modes of torch, threads, devices, limits, gradients, references, orders; each as if resident."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_offload_fix import backend, binding, homes
from tests import cells, sim, simulated
from tests.kinds import KINDS, contract
from tests.pairs import SORTS, WAYS, WRAPPERS, Pair, every, live_bytes, make, require


@every(("name", SORTS), ("way", WAYS))
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_under_a_mode_of_torch(guard: Callable[[], AbstractContextManager[Any]], name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    for _ in range(3):
        with guard():
            assert torch.equal(pair.model(pair.example), pair.resident(pair.example))
        assert contract.leaves_off(pair.model, "cpu") == []
    pair.check()


@every(("name", SORTS), ("way", WAYS))
def test_in_another_thread_than_the_one_that_enabled(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            pair.check()
        except BaseException as error:  # it is raised again in the test's own thread
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert errors == []
    pair.check(1)


@every(("name", SORTS), ("way", WAYS))
def test_a_model_that_was_made_in_inference_mode(name: str, way: str, npu: torch.device) -> None:
    require(name, npu)
    with torch.inference_mode():
        model, example = KINDS[name].build()
        try:
            wanted = KINDS[name].resident(npu)[0](example.to(npu))
        except Exception as error:
            pytest.skip(f"refused without offloading too: {type(error).__name__}: {str(error)[:80]}")
    simulated.enable(model, npu, cells.MODES[way])
    for guard in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with guard():
            assert torch.equal(model(example.to(npu)), wanted)
        assert contract.leaves_off(model, "cpu") == []


@every(("name", SORTS), ("way", ("block", "block+stream", "leaf+stream", "block+stream+low")))
def test_on_the_device_that_is_not_the_current_one(name: str, way: str, npu: torch.device) -> None:
    require(name, npu)
    torch.get_device_module("npu").reset_peak_memory_stats(0)
    first = live_bytes(npu)
    assert cells.run(name, cells.MODES[way], simulated.setting(1)) == []
    assert torch.get_device_module("npu").current_device() == 0
    assert torch.get_device_module("npu").max_memory_allocated(0) == first


@every(("name", SORTS))
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_pin_that_fails_is_told_once(
    name: str, share: float, npu: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "_warned", set())
    weights = sum(leaf.nbytes for t in make(name).parameters() for _, leaf in contract.leaves(t))
    sim.set_pin_limit(int(share * weights))
    with caplog.at_level(logging.WARNING, "diffusers_offload_fix"):
        pair = Pair(name, "block+stream", npu)
        pair.check(3)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("diffusers_offload_fix")]
    assert len(warnings) == 1
    for words in (" bytes", "pin", "slower", "low_cpu_mem_usage"):
        assert words in warnings[0]
    pinned = sim.counters()["pinned_bytes"]
    assert pinned == 0 if not share else 0 < pinned <= share * weights


class _Registrar:
    """Registration on the simulated device, as `cudaHostRegister` on a real one."""

    def register(self, address: int, nbytes: int) -> None:
        torch.get_device_module("npu").host_register(address, nbytes)

    def unregister(self, address: int) -> None:
        torch.get_device_module("npu").host_unregister(address)


@every(("name", SORTS))
def test_registered_memory_costs_what_it_holds(name: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.REGISTRARS, "npu", _Registrar())
    pair = Pair(name, "block+stream", npu)
    pair.check()
    weights = sum(leaf.nbytes for t in make(name).state_dict().values() for _, leaf in contract.leaves(t))
    assert weights <= sim.counters()["pinned_bytes"] <= 1.25 * weights + 4096
    del pair
    gc.collect()
    # A copy ahead of a forward that never comes may still be on its way.
    torch.get_device_module("npu").synchronize()
    gc.collect()
    assert sim.counters()["pinned_bytes"] == 0


def test_registration_that_is_refused_leaves_the_weights_unpinned(
    npu: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backend.REGISTRARS, "npu", _Registrar())
    monkeypatch.setattr(homes, "_warned", set())
    sim.set_host_register("fail")
    with caplog.at_level(logging.WARNING, "diffusers_offload_fix"):
        Pair(SORTS[0], "block+stream", npu).check()
    assert sum("operation not supported" in record.getMessage() for record in caplog.records) == 1


def test_without_registration_torch_pins(npu: torch.device) -> None:
    sim.set_host_register(False)
    pair = Pair(SORTS[0], "block+stream", npu)
    pair.check()
    assert sim.counters()["pinned_bytes"] > 0


@every(("name", SORTS), ("way", ("block+stream+low", "leaf+stream+low", "leaf+low")))
def test_low_cpu_mem_usage_pins_no_weight(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    pair.check()
    tensors = [*pair.model.parameters(), *pair.model.buffers()]
    assert not any(leaf.is_pinned() for tensor in tensors for _, leaf in contract.leaves(tensor))


@every(("name", SORTS), ("way", WAYS))
def test_device_memory_that_runs_out_loses_nothing(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    before = contract.fingerprint(pair.model)
    weights = sum(leaf.nbytes for t in pair.model.parameters() for _, leaf in contract.leaves(t))
    failures = 0
    for share in (0.05, 0.2, 0.35, 0.5):
        sim.set_memory_limit(pair.before + int(share * weights))
        try:
            with torch.no_grad():
                pair.model(pair.example)
        except RuntimeError:
            failures += 1
        sim.set_memory_limit(None)
        assert contract.diff(before, contract.fingerprint(pair.model)) == []
        assert live_bytes(npu) <= pair.before
        pair.check(1)
    assert failures


@every(("name", ("plain-tied-in-block", "plain-tied-neighbours", "plain-tied-root", "plain-tied-buffers")), ("way", WAYS))
def test_a_tie_survives_an_edit(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    ties = contract.tied_names(pair.model)
    pair.check()
    reference = make(name)
    for model in (pair.model, reference):
        with torch.no_grad():
            model.blocks[0].mix.weight.mul_(2)
            model.blocks[0].shift.add_(1)
    pair.expect(reference)
    pair.check()
    assert contract.tied_names(pair.model) == ties


@every(("name", SORTS), ("way", WAYS))
def test_enabling_twice(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    for passes in (0, 1):
        pair.check(passes)
        try:
            simulated.enable(pair.model, npu, pair.mode)
        except ValueError as error:  # upstream refuses it for groups with streams
            assert "already exists" in str(error)
        pair.check()


@every(("name", SORTS), ("way", WAYS))
def test_gradients_are_those_of_the_resident_model(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    for _ in range(2):
        inputs = [pair.example.clone().requires_grad_() for _ in range(2)]
        wanted, got = pair.resident(inputs[0]), pair.model(inputs[1])
        assert torch.equal(got.detach(), wanted.detach())
        assert contract.leaves_off(pair.model, "cpu") == []
        wanted.float().sum().backward()
        got.float().sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for model in (pair.resident, pair.model):
            model.zero_grad()
    del wanted, got, inputs
    pair.check()


@every(("name", SORTS), ("way", WAYS))
def test_a_weight_that_is_changed_right_after_a_forward(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    for _ in range(4):
        with torch.no_grad():
            got = pair.model(pair.example)
            for tensor in pair.model.parameters():
                for _, leaf in contract.leaves(tensor):
                    leaf.copy_(leaf + 1 if leaf.dtype == torch.int8 else leaf * 1.03)
            assert torch.equal(got, pair.resident(pair.example))
            for tensor in pair.resident.parameters():
                for _, leaf in contract.leaves(tensor):
                    leaf.copy_(leaf + 1 if leaf.dtype == torch.int8 else leaf * 1.03)
            del got


@every(("name", WRAPPERS), ("way", WAYS))
@pytest.mark.parametrize("weak", [True, False])
def test_the_way_in_place_gives_the_same(weak: bool, name: str, way: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not weak:
        monkeypatch.setattr(binding, "forced_way", "in_place")
        assert cells.run(name, cells.MODES[way], simulated.setting()) == []
        return
    pair = Pair(name, way, npu)
    kept = [weakref.ref(parameter) for parameter in pair.model.parameters()]
    pair.check(3)
    assert all(reference() is not None for reference in kept)


@every(("name", WRAPPERS), ("way", WAYS))
def test_a_weak_reference_that_comes_and_goes(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    kept: list[Any] = []
    handle = pair.model.blocks[1].mix.register_forward_pre_hook(lambda m, _: kept.append(weakref.ref(m.weight)))
    pair.check()
    handle.remove()
    kept.clear()
    pair.check()


@every(("name", SORTS), ("way", WAYS))
def test_attributes_that_forward_sets_stay(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)

    def note(module: nn.Module, *_: Any) -> None:
        weight: Any = module.weight
        weight.seen = getattr(weight, "seen", 0) + 1

    handle = pair.model.blocks[2].mix.register_forward_hook(note)
    pair.check(3)
    handle.remove()
    assert pair.model.blocks[2].mix.weight.seen == 3
    pair.check(1)
    assert pair.model.blocks[2].mix.weight.seen == 3


@every(("name", SORTS))
def test_one_copy_for_each_group_and_no_wait_of_the_host(name: str, npu: torch.device) -> None:
    pair = Pair(name, "block+stream", npu)
    pair.check(3)
    for _ in range(2):
        sim.reset_counters()
        with torch.no_grad():
            pair.model(pair.example)
        counted = sim.counters()
        assert counted["h2d"] == 1 + len(pair.model.blocks)
        assert counted["d2h"] == 0
        # The end of a forward waits for the last copy, unless it is through already.
        assert counted["host_syncs"] <= 1


@every(("name", SORTS), ("way", ("block+stream", "leaf+stream+record", "block+stream+low")))
def test_any_order_at_any_speed(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    chance = random.Random(0)
    for block in pair.model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(chance.random() * 5e-4))
    depth = len(pair.model.blocks)
    for _ in range(50):
        plan = [chance.randrange(depth) for _ in range(chance.randrange(1, 2 * depth))]
        pair.model.plan = pair.resident.plan = plan
        with torch.no_grad():
            assert torch.equal(pair.model(pair.example), pair.resident(pair.example)), plan
    assert sim.hazards() == []
    pair.check()
