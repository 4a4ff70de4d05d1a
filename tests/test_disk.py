"""Weights in files: whose they are, what the files look like, and edits, copies and saves of a model whose weights are there."""

from __future__ import annotations

import copy
import gc
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_offload_fix import disk, files, groups, homes, manifest, pages
from tests import cells, simulated, tiny
from tests.kinds import KINDS, contract
from tests.pairs import SORTS, Pair, checked_for_what_is_kept, every, forward, make, require
from tests.test_contract import EDITS, edited

DISK_WAYS = ("block+disk", "leaf+stream+disk")


def _untold(model: Any, other: Any) -> None:
    """As a LoRA is fused: no counter of any tensor tells."""
    for mine, theirs in zip(model.parameters(), other.parameters()):
        for (_, leaf), (_, value) in zip(contract.leaves(mine), contract.leaves(theirs)):
            before = leaf._version
            leaf.data.copy_(value)
            assert leaf._version == before


ALL_EDITS = {**EDITS, "untold": _untold}


def enable(model: nn.Module, device: torch.device, folder: Path | str, **options: Any) -> nn.Module:
    mode = cells.Mode("", {"offload_type": "block_level", "num_blocks_per_group": 1, **options})
    simulated.enable(model, device, mode, offload_to_disk_path=str(folder))
    return model


def units(model: nn.Module) -> list[Any]:
    states = [groups.state_of(hook.group) for hook in map(groups.group_hooks, model.modules()) if hook is not None]
    return groups.unique(unit for state in states if state is not None for unit in state.units)


def contents(file: disk.File) -> bytes:
    assert file.fd is not None
    return os.pread(file.fd, os.fstat(file.fd).st_size, 0)


@every(("name", SORTS), ("way", DISK_WAYS), ("edit", tuple(ALL_EDITS)))
def test_an_edit_on_disk_counts(name: str, way: str, edit: str, npu: torch.device) -> None:
    if edit == "submodule" and way.startswith("leaf"):
        pytest.skip("a new leaf has no hook of its own: offloading has to be enabled anew")
    require(name)
    reference = make(name, seed=1) if edit == "untold" else edited(name, edit)
    if edit == "untold":
        for (_, mine), (_, theirs) in zip(reference.named_buffers(), make(name).named_buffers()):
            mine.data.copy_(theirs)
    pair = Pair(name, way, npu)
    pair.check(1)
    ALL_EDITS[edit](pair.model, make(name, seed=1))
    pair.expect(reference)
    pair.check(3)


@every(("name", SORTS), ("way", DISK_WAYS))
def test_what_is_kept_of_a_model_on_disk_is_what_it_is(name: str, way: str, npu: torch.device) -> None:
    pair = checked_for_what_is_kept(name, way, npu)
    assert contract.same_state_dict_bytes(copy.deepcopy(pair.model.state_dict()), make(name).state_dict()) == []
    pair.check()


@every(("way", DISK_WAYS))
def test_a_change_of_dtype_on_disk_counts(way: str, npu: torch.device) -> None:
    reference = make("plain-bfloat16").to(torch.float32)
    pair = Pair("plain-bfloat16", way, npu)
    pair.check(1)
    pair.model.to(torch.float32)
    pair.example = pair.example.float()
    pair.expect(reference)
    pair.check()
    assert all(isinstance(unit.home, files.FileHome) for unit in units(pair.model))


def test_save_pretrained_writes_the_same_files(npu: torch.device, tmp_path: Path) -> None:
    pipe = tiny.build("plain")
    pipe.transformer.save_pretrained(tmp_path / "before", max_shard_size="60KB")
    pipe.vae.to(npu)
    enable(pipe.transformer, npu, tmp_path / "disk", use_stream=True)
    tiny.call(pipe, npu)
    pipe.transformer.save_pretrained(tmp_path / "after", max_shard_size="60KB")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes()


@pytest.mark.parametrize("name", ["plain-bfloat16", "plain-tied-root", "plain-strided", "torchao-int8wo", "own-repack-class"])
def test_the_file_is_safetensors_with_a_manifest_that_rebuilds_every_leaf(name: str, npu: torch.device, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    require(name, npu)
    model = make(name)
    known = set(disk.files())
    enable(model, npu, tmp_path)
    (file,) = set(disk.files()) - known
    with safetensors.safe_open(f"/proc/self/fd/{file.fd}", framework="pt") as opened:
        listed = json.loads(opened.metadata()[manifest.MANIFEST])
        entries = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dictionary
    assert listed["version"] == 1
    leaves = [(tensor["class"], leaf) for tensor in listed["tensors"] for leaf in tensor["leaves"]]
    found = sorted((kind, leaf["path"], _rebuilt(leaf, entries)) for kind, leaf in leaves)
    bindings = [binding for unit in units(model) for binding in unit._bindings]
    tensors = [(binding.form, binding.cargo) for binding in bindings]
    tensors += [(binding.tensor, binding.rest) for binding in bindings if binding.rest]
    wanted = [(f"{type(t).__module__}.{type(t).__qualname__}", _bytes(leaf)) for t, cargo in tensors for leaf in cargo]
    assert sorted((kind, data) for kind, _, data in found) == sorted(wanted)


def _rebuilt(leaf: dict[str, Any], entries: dict[str, torch.Tensor]) -> bytes:
    entry = entries[leaf["entry"]]
    dtype = getattr(torch, leaf["dtype"])
    flat = entry.reshape(-1).view(torch.uint8)[leaf["offset"] :].clone()
    flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return _bytes(flat.as_strided(leaf["shape"], leaf["stride"])) if 0 not in leaf["shape"] else b""


def _bytes(leaf: torch.Tensor) -> bytes:
    return contract.read_bytes(leaf)


def test_the_folder_is_private_and_nothing_is_left_in_it(npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = tmp_path / "missing" / "folder", []
    real = os.fsync

    def fsync(fd: int) -> None:
        seen.append((stat.S_IMODE(os.fstat(fd).st_mode), os.fstat(fd).st_nlink, os.fstat(fd).st_uid, list(folder.iterdir())))
        real(fd)

    modes: list[int] = []
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rmdir", lambda path, real=os.rmdir: (modes.append(stat.S_IMODE(os.stat(path).st_mode)), real(path)))
    model = enable(make("plain-bfloat16"), npu, folder)
    assert seen == [(0o600, 0, os.geteuid(), [])]
    assert modes and set(modes) == {0o700}
    forward(model, KINDS["plain-bfloat16"].build()[1].to(npu))
    assert list(folder.iterdir()) == []


def test_the_file_goes_with_the_model_and_not_before_its_last_tensor(npu: torch.device, tmp_path: Path) -> None:
    before = set(disk.files())
    model = enable(make("plain-bfloat16"), npu, tmp_path)
    state = {key: value for key, value in model.state_dict().items() if "mix" in key}
    wanted = {key: value.clone() for key, value in state.items()}
    opened = [file.fd for file in set(disk.files()) - before]
    assert len(opened) == 1
    del model
    gc.collect()
    assert set(disk.files()) <= before
    with pytest.raises(OSError):
        os.fstat(opened[0])
    # The descriptor is gone; what somebody still holds keeps its bytes.
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def test_d1_two_components_of_one_class_in_one_folder(npu: torch.device, tmp_path: Path) -> None:
    name = "plain-bfloat16"
    models = [enable(make(name, seed), npu, tmp_path, use_stream=True) for seed in (0, 1)]
    residents = [make(name, seed).to(npu) for seed in (0, 1)]
    example = KINDS[name].build()[1].to(npu)
    for _ in range(2):
        for model, resident in zip(models, residents):
            assert torch.equal(forward(model, example), forward(resident, example))


@pytest.mark.parametrize("change", ["checkpoint", "dtype", "fused"])
def test_d2_a_folder_that_was_used_before(change: str, npu: torch.device, tmp_path: Path) -> None:
    name = "plain-float32"
    example = KINDS[name].build()[1].to(npu)
    forward(enable(make(name), npu, tmp_path), example)
    # What upstream leaves behind there must not be met either.
    for index in range(4):
        (tmp_path / f"group_{index}.safetensors").write_bytes(b"stale")

    def changed() -> Any:
        model = make(name, seed=1 if change == "checkpoint" else 0)
        with torch.no_grad():
            for weight in model.parameters() if change == "fused" else ():
                weight.add_(0.25)
        return model.to(torch.bfloat16) if change == "dtype" else model

    example = example.to(torch.bfloat16) if change == "dtype" else example
    model = enable(changed(), npu, tmp_path)
    assert torch.equal(forward(model, example), forward(changed().to(npu), example))


def test_a_tie_between_a_model_on_disk_and_one_in_memory(npu: torch.device, tmp_path: Path) -> None:
    name = "plain-bfloat16"
    one, two, resident = make(name), make(name, seed=1), make(name, seed=1)
    two.blocks[1].mix.weight = one.blocks[2].mix.weight
    resident.blocks[1].mix.weight = nn.Parameter(one.blocks[2].mix.weight.detach().clone())
    resident, first = resident.to(npu), make(name).to(npu)
    example = KINDS[name].build()[1].to(npu)
    enable(one, npu, tmp_path, use_stream=True)
    simulated.enable(two, npu, cells.MODES["block+stream"])
    for _ in range(3):
        assert torch.equal(forward(one, example), forward(first, example))
        assert torch.equal(forward(two, example), forward(resident, example))
    shared = [unit for unit in units(one) if any(unit is other for other in units(two))]
    assert [(unit.keep, len(unit.entries)) for unit in shared] == [(homes.Keep.PINNED, 1)]


def test_m1_the_second_device_gets_its_weights_itself(npu: torch.device, tmp_path: Path) -> None:
    second = torch.device("npu", 1)
    name = "torchao-int8wo" if KINDS["torchao-int8wo"].runs(second) is None else "plain-bfloat16"
    for mode in ("block+disk", "leaf+stream+disk"):
        assert cells.run(name, cells.DISK_MODES[mode], simulated.setting(1)) == []


def test_a_system_that_does_not_tell_of_pages(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAGEMAP", "/nonexistent")
    pair = Pair("plain-bfloat16", "leaf+stream+disk", npu)
    pair.check(1)
    _untold(pair.model, make("plain-bfloat16", seed=1))
    reference = make("plain-bfloat16", seed=1)
    for (_, mine), (_, theirs) in zip(reference.named_buffers(), make("plain-bfloat16").named_buffers()):
        mine.data.copy_(theirs)
    pair.expect(reference)
    pair.check(2)


def test_hooks_that_are_removed_leave_an_ordinary_model(npu: torch.device, tmp_path: Path) -> None:
    name = "torchao-int8wo" if KINDS["torchao-int8wo"].runs(npu) is None else "plain-bfloat16"
    model = enable(make(name), npu, tmp_path)
    wanted = contract.fingerprint(model)
    registry = model._diffusers_hook
    registry.remove_hook("group_offloading", recurse=True)
    gc.collect()
    assert contract.diff(wanted, contract.fingerprint(model)) == []
    example = KINDS[name].build()[1]
    assert torch.equal(forward(model, example), forward(make(name), example))
