"""The contract of a tensor kind: it sees planted faults, and nothing else.

A test of a fault breaks one thing by hand and asks that exactly this is reported. All of it runs on the CPU.
"""

from typing import Any

import torch
from torch import nn

from tests.kinds import KINDS, contract, repack
from tests.kinds.models import Stack, build_stack


def planted(name: str = "own-three-deep") -> tuple[Any, contract.Fingerprint]:
    model, _ = KINDS[name].build()
    return model, contract.fingerprint(model)


def faults(model: nn.Module, before: contract.Fingerprint) -> list[str]:
    return contract.diff(before, contract.fingerprint(model))


def test_no_fault_is_no_difference() -> None:
    assert faults(*planted()) == []


def test_a_changed_byte_is_seen() -> None:
    model, before = planted()
    model.blocks[1].down.weight.nested.inside.qdata[3, 5] += 1
    (found,) = faults(model, before)
    assert found.startswith("blocks.1.down.weight: leaf nested.inside.qdata: 1 bytes differ")


def test_a_lost_attribute_is_seen() -> None:
    model, before = planted("own-attributes")
    del model.proj_in.weight.quant_type
    model.proj_out.weight.history.append("later")
    assert [line.split(" was")[0] for line in faults(model, before)] == [
        "proj_in.weight: attribute quant_type",
        "proj_out.weight: attribute history",
    ]


def test_a_lost_parameter_type_is_seen() -> None:
    model, before = planted("own-movable")
    plain = model.proj_in.weight.detach()
    plain.__dict__.update({k: v for k, v in vars(model.proj_in.weight).items() if k not in ("qdata", "scale", "_is_param")})
    model.proj_in._parameters["weight"] = plain
    assert faults(model, before) == ["proj_in.weight: is_parameter was True, is False"]


def test_other_strides_and_requires_grad_are_seen() -> None:
    model, before = planted("plain-strided")
    block = model.blocks[0]
    block.mix.weight.data = block.mix.weight.data.contiguous()
    block.up.weight.requires_grad_(True)
    found = faults(model, before)
    assert "blocks.0.up.weight: requires_grad was False, is True" in found
    assert any(line.startswith("blocks.0.mix.weight: strides") for line in found)


def test_a_stale_outer_device_is_seen() -> None:
    model, _ = planted("own-movable")
    weight = model.blocks[2].up.weight
    weight.qdata = weight.qdata.to("meta")
    found = contract.leaves_off(model, "cpu")
    assert "blocks.2.up.weight says cpu, but its qdata is on meta" in found
    assert "blocks.2.up.weight.qdata is on meta" in found
    weight.scale = weight.scale.to("meta")
    assert len(contract.leaves_off(model, "meta")) > len(contract.leaves_off(model, "cpu"))


def test_a_leaf_outside_the_flattened_names_is_seen() -> None:
    weight = repack.DeviceNibbles.pack(torch.zeros(8, 8, dtype=torch.uint8), torch.ones(8, 1), torch.ones(8, 1))
    model: Any = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(weight, requires_grad=False)
    model.weight._workspace = torch.zeros(4, device="meta")
    assert contract.leaves_off(model, "cpu") == ["weight._workspace is on meta"]


def test_module_state_is_seen() -> None:
    class State:
        def __init__(self) -> None:
            self.held = torch.arange(3)

    model: Any = nn.Linear(2, 2)
    model.state = State()
    before = contract.fingerprint(model)
    model.state.held[0] = 7
    assert faults(model, before) == [":state: leaf state.held: 1 bytes differ, the first at byte 0"]
    model.state.held = model.state.held.to("meta")
    assert contract.leaves_off(model, "cpu") == ["state.held is on meta"]


def test_a_broken_tie_and_identity_are_seen() -> None:
    model, _ = KINDS["plain-tied-root"].build()
    ties, ids = contract.tied_names(model), contract.snapshot_ids(model)
    model.proj_in.weight = nn.Parameter(model.proj_in.weight.detach())
    assert contract.tied_names(model) != ties
    now = contract.snapshot_ids(model)
    assert [name for name in ids if ids[name] != now[name]] == ["proj_in.weight"]


def test_state_dicts_compare_by_bytes() -> None:
    (first, _), (second, _) = KINDS["own-nested"].build(), KINDS["own-nested"].build()
    assert contract.same_state_dict_bytes(first.state_dict(), second.state_dict()) == []
    second.proj_out.weight.row_shift[0] = 9
    (found,) = contract.same_state_dict_bytes(first.state_dict(), second.state_dict())
    assert found.startswith("proj_out.weight.row_shift: ")
    lacking = dict(second.state_dict())
    del lacking["loose"]
    assert "only in the first: loose" in contract.same_state_dict_bytes(first.state_dict(), lacking)


def test_bloat_is_seen() -> None:
    model, _ = build_stack(Stack)
    size = contract.saved_size(model)
    slab = torch.zeros(1 << 20)
    view = slab[: model.loose.numel()].copy_(model.loose.detach())
    model.loose.data = view
    assert contract.saved_size(model) > size + slab.nbytes // 2


def test_persistence_reports_refusals_as_text() -> None:
    bare = contract.persistence(KINDS["own-bare"].build()[0])
    assert bare["deepcopy"].startswith("NotImplementedError")
    movable = contract.persistence(KINDS["own-movable"].build()[0])
    assert not any(isinstance(value, str) for value in movable.values())
    assert movable == contract.persistence(KINDS["own-movable"].build()[0])
