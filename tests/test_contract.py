"""Edits and copies of a model while it is offloaded: each works, and counts, as on a model that never was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import cells, simulated, tiny
from tests.kinds import contract
from tests.pairs import SORTS, WAYS, Pair, checked_for_what_is_kept, every, forward, make, require

Edit = Callable[[Any, Any], object]


def _copy(model: Any, other: Any) -> None:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters()):
            mine.copy_(theirs)


def _copy_leaves(model: Any, other: Any) -> None:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters()):
            for (_, leaf), (_, value) in zip(contract.leaves(mine), contract.leaves(theirs)):
                leaf.copy_(value)


def _replace_data(model: Any, other: Any) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters()):
        mine.data = theirs.data


def _new_parameters(model: Any, other: Any) -> None:
    for mine, theirs in zip(model.blocks, other.blocks):
        mine.mix.weight = nn.Parameter(theirs.mix.weight.detach(), requires_grad=False)


def _new_loose(model: Any, other: Any) -> None:
    model.loose = nn.Parameter(other.loose.detach().clone(), requires_grad=False)


def _new_buffers(model: Any, other: Any) -> None:
    model.offset = other.offset.clone()
    for mine, theirs in zip(model.blocks, other.blocks):
        mine.shift = theirs.shift.clone()


def _written_buffers(model: Any, other: Any) -> None:
    for mine, theirs in zip(model.buffers(), other.buffers()):
        mine.copy_(theirs)


def _new_submodule(model: Any, other: Any) -> None:
    model.blocks[1].mix = other.blocks[1].mix


EDITS: dict[str, Edit] = {
    "copy_": _copy,
    "leaves": _copy_leaves,
    "load": lambda model, other: model.load_state_dict(other.state_dict()),
    "assign": lambda model, other: model.load_state_dict(other.state_dict(), assign=True),
    "data": _replace_data,
    "parameter": _new_parameters,
    "loose": _new_loose,
    "buffer": _new_buffers,
    "written-buffer": _written_buffers,
    "submodule": _new_submodule,
}


def edited(name: str, edit: str) -> Any:
    """A model that was edited without ever being offloaded; skips where its classes refuse the edit."""
    require(name)
    model = make(name)
    try:
        EDITS[edit](model, make(name, seed=1))
    except Exception as error:
        pytest.skip(f"refused without offloading too: {type(error).__name__}: {str(error)[:80]}")
    return model


@every(("name", SORTS), ("way", WAYS), ("edit", tuple(EDITS)))
def test_an_edit_while_offloaded_counts(name: str, way: str, edit: str, npu: torch.device) -> None:
    if edit == "submodule" and way.startswith("leaf"):
        pytest.skip("a new leaf has no hook of its own: offloading has to be enabled anew")
    reference = edited(name, edit)
    for passes in (0, 1):
        pair = Pair(name, way, npu)
        pair.check(passes)
        EDITS[edit](pair.model, make(name, seed=1))
        pair.expect(copy.deepcopy(reference) if name == SORTS[0] else edited(name, edit))
        pair.check()


@every(("name", SORTS), ("way", WAYS))
def test_a_change_of_dtype_while_offloaded_counts(name: str, way: str, npu: torch.device) -> None:
    require(name)
    try:
        reference = make(name).to(torch.float32)
        forward(reference, reference.make_input(dtype=torch.float32))
    except Exception as error:
        pytest.skip(f"refused without offloading too: {type(error).__name__}: {str(error)[:80]}")
    pair = Pair(name, way, npu)
    pair.check(1)
    pair.model.to(torch.float32)
    pair.example = pair.example.float()
    pair.expect(reference)
    pair.check()


@every(("name", SORTS), ("way", WAYS))
def test_what_is_kept_of_an_offloaded_model_is_what_it_is(name: str, way: str, npu: torch.device) -> None:
    checked_for_what_is_kept(name, way, npu).check()


@every(("name", SORTS), ("way", WAYS))
def test_copies_of_parameters_and_of_the_state(name: str, way: str, npu: torch.device) -> None:
    pair = Pair(name, way, npu)
    pair.check(1)
    fresh = make(name)
    assert contract.same_state_dict_bytes(copy.deepcopy(pair.model.state_dict()), fresh.state_dict()) == []
    assert contract.same_state_dict_bytes(pair.model.state_dict(), fresh.state_dict()) == []
    for mine, plain in zip(pair.model.parameters(), fresh.parameters()):
        assert _deep_copied(mine) == _deep_copied(plain)
    pair.check()


def _deep_copied(parameter: torch.Tensor) -> Any:
    try:
        twin = copy.deepcopy(parameter)
    except Exception as error:  # quanto's weights refuse
        return type(error).__name__
    inside = {path: contract.read_bytes(leaf) for path, leaf in contract.leaves(twin)}
    return type(twin), isinstance(twin, nn.Parameter), twin.device, twin.requires_grad, inside


@every(("name", SORTS), ("way", WAYS))
def test_a_pickled_state_comes_back(name: str, way: str, npu: torch.device) -> None:
    require(name)
    try:
        wanted = pickle.dumps(make(name).state_dict())
    except Exception as error:
        pytest.skip(f"refused without offloading too: {type(error).__name__}")
    pair = Pair(name, way, npu)
    pair.check(1)
    found = pickle.dumps(pair.model.state_dict())
    # Ids of storages are in it, so the length may differ by a few digits.
    assert abs(len(found) - len(wanted)) < 0.01 * len(wanted)
    assert contract.same_state_dict_bytes(pickle.loads(found), make(name).state_dict()) == []


@every(("name", SORTS), ("way", WAYS))
def test_a_copy_of_an_offloaded_model_is_a_model_by_itself(name: str, way: str, npu: torch.device) -> None:
    require(name)
    try:
        copy.deepcopy(make(name))
    except Exception as error:
        pytest.skip(f"refused without offloading too: {type(error).__name__}")
    pair = Pair(name, way, npu)
    pair.check(1)
    twin = copy.deepcopy(pair.model)
    assert contract.leaves_off(twin, "cpu") == []
    pair.check()
    with torch.no_grad():
        EDITS["leaves"](twin, make(name, seed=1))
    pair.check()


@pytest.mark.parametrize("weights", tiny.WEIGHTS)
@pytest.mark.parametrize("way", WAYS)
def test_save_pretrained_writes_the_same_files(weights: str, way: str, npu: torch.device, tmp_path: Path) -> None:
    def save(model: Any, name: str) -> dict[str, int] | str:
        try:
            model.save_pretrained(tmp_path / name, max_shard_size="60KB", safe_serialization=weights == "plain")
        except Exception as error:  # some classes cannot be saved this way, offloaded or not
            return type(error).__name__
        return {path.name: path.stat().st_size for path in sorted((tmp_path / name).iterdir())}

    pipe = tiny.build(weights)
    wanted = save(pipe.transformer, "before")
    pipe.vae.to(npu)
    simulated.enable(pipe.transformer, npu, cells.MODES[way])
    for index in range(2):
        tiny.call(pipe, npu)
        assert save(pipe.transformer, f"after-{index}") == wanted
    if weights == "plain":
        assert len(wanted) > 3
        for path in (tmp_path / "before").iterdir():
            assert path.read_bytes() == (tmp_path / "after-1" / path.name).read_bytes()
