"""The catalogue itself, on the CPU: kinds build the same bytes twice, run, flatten and unflatten, and say what they cannot do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.kinds import KINDS, Kind, contract, own, repack
from tests.kinds.models import Interrupted, build_stack

ALWAYS = [name for name, kind in KINDS.items() if kind.library in ("torch", "own") and "mesh" not in kind.tags]
"""Kinds that need nothing but torch: for them a reason is a failure, not a skip."""

EXPECTED = {
    "torchao": ["torchao-nf4"],
    "optimum": [f"quanto-{name}" for name in ("qint8", "qint4", "qint2", "qfloat8", "qint4-tinygemm")],
    "bitsandbytes": ["bnb-nf4", "bnb-nf4-double", "bnb-int8"],
    "gguf": ["gguf-q8_0", "gguf-q4_0"],
}
"""Kinds that every supported release of an installed library can build on the CPU."""


TORCHAO = {
    ">=0.15": [
        "int8wo",
        "int8dq",
        "float8wo",
        "float8dq-row-by-hand",
        "float8dq-tensor-by-hand",
        "intx-int8",
        "intx-int4",
        "mxfp8",
        "nvfp4wo",
    ],
    ">=0.16": ["int8wo-smooth", "int8dq-smooth"],
    "<0.18": ["int8wo-v1", "int8dq-v1"],
    "<0.16": ["float8wo-v1", "int4-cpu-v1"],
    "<0.17": ["uint4", "int4dq-v1"],
}
"""What each release of torchao must be able to build on the CPU, so that a renamed config is no silent skip."""


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    found = KINDS[request.param]
    if reason := found.reason():
        pytest.skip(reason)
    return found


def _within(releases: str) -> list[Version]:
    return [v for minor in range(9, 40) if (v := Version(f"0.{minor}")) in SpecifierSet(releases)]


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for _, name, tensor in contract.named_tensors(model))


@pytest.mark.parametrize("name", ALWAYS)
def test_torch_alone_is_enough(name: str) -> None:
    assert KINDS[name].reason() is None


@pytest.mark.parametrize(("library", "names"), EXPECTED.items(), ids=EXPECTED)
def test_an_installed_library_has_its_kinds(library: str, names: list[str]) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    assert {name: KINDS[name].reason() for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize(("releases", "names"), TORCHAO.items(), ids=TORCHAO)
def test_a_release_of_torchao_has_its_kinds(releases: str, names: list[str]) -> None:
    torchao = pytest.importorskip("torchao")
    if Version(torchao.__version__).release[:2] not in [v.release[:2] for v in _within(releases)]:
        pytest.skip(f"about torchao {releases}")
    assert {name: KINDS[f"torchao-{name}"].reason() for name in names} == dict.fromkeys(names)


def test_two_builds_are_the_same(kind: Kind) -> None:
    (first, x), (second, y) = kind.build(), kind.build()
    assert contract.diff(contract.fingerprint(first), contract.fingerprint(second)) == []
    assert contract.tied_names(first) == contract.tied_names(second)
    assert torch.equal(x, y)
    assert contract.leaves_off(first, "cpu") == []


def test_another_seed_is_another_model(kind: Kind) -> None:
    (first, _), (second, _) = kind.build(seed=0), kind.build(seed=1)
    assert contract.diff(contract.fingerprint(first), contract.fingerprint(second)) != []


def test_forward_is_repeatable(kind: Kind) -> None:
    if reason := kind.runs():
        pytest.skip(reason)
    (first, x), (second, _) = kind.build(), kind.build()
    with torch.no_grad():
        for _ in range(2):
            one, two = first(x), second(x)
            assert torch.isfinite(one).all()
            assert torch.equal(one, two)
    if "buffers" not in kind.tags:
        with torch.no_grad():
            assert torch.equal(one, first(x))


def test_forward_reads_without_writing(kind: Kind) -> None:
    if kind.runs() or kind.tags & {"buffers", "state"}:
        pytest.skip("does not run here, or its forward changes tensors by design")
    model, x = kind.build()
    before = contract.fingerprint(model)
    with torch.no_grad():
        model(x)
    assert contract.diff(before, contract.fingerprint(model)) == []


@pytest.mark.parametrize("name", ["plain-changing-buffers", "plain-batch-norm"])
def test_changing_buffers_change_and_matter(name: str) -> None:
    model, x = KINDS[name].build()
    before = contract.fingerprint(model)
    with torch.no_grad():
        first = model(x)
        changed = contract.diff(before, contract.fingerprint(model))
        assert {line.split(":")[0].split(".")[1] for line in changed} == {"0", "1", "2", "3"}
        assert not torch.equal(first, model(x))


def test_flatten_and_unflatten(kind: Kind) -> None:
    if "wrapper" not in kind.tags:
        pytest.skip("holds no wrapper subclass")
    model, _ = kind.build()
    wrappers = [(name, t) for name, t in tensors(model) if is_traceable_wrapper_subclass(t)]
    assert wrappers
    for name, tensor in wrappers:
        names, context = tensor.__tensor_flatten__()
        inner = {key: getattr(tensor, key) for key in names}
        made = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        ours, theirs = (dict(contract.leaves(x)) for x in (tensor, made))
        assert type(made) is type(tensor), name
        assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        for path in ours.keys() & theirs.keys():
            assert contract.read_bytes(ours[path]) == contract.read_bytes(theirs[path]), (name, path)


def test_every_byte_matters() -> None:
    """Changing any one tensor of the base model changes its output, so a stale one cannot hide."""
    model, x = build_stack()
    with torch.no_grad():
        right = model(x)
        for name, tensor in tensors(model):
            kept = tensor.clone()
            tensor.reshape(-1)[0] += 1
            assert not torch.equal(model(x), right), name
            tensor.copy_(kept)
        assert torch.equal(model(x), right)


def test_fail_at_raises_half_way() -> None:
    model, x = build_stack()
    model.fail_at = 2
    assert model.fail_at == 2
    with pytest.raises(Interrupted), torch.no_grad():
        model(x)
    model.fail_at = None
    with torch.no_grad():
        assert torch.isfinite(model(x)).all()


def test_plan_orders_the_blocks() -> None:
    model, x = build_stack()
    seen: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: seen.append(index))
    for plan in ([0, 2], [3, 2, 1, 0], [1, 1, 3]):
        model.plan, seen[:] = plan, []
        with torch.no_grad():
            model(x)
        assert seen == plan


@pytest.mark.parametrize("name", ["plain-tied-in-block", "plain-tied-neighbours", "plain-tied-root", "plain-tied-buffers"])
def test_ties_hold(name: str) -> None:
    assert contract.tied_names(KINDS[name].build()[0])


def test_strides_are_what_they_say() -> None:
    strided = KINDS["plain-strided"].build()[0].blocks[0]
    assert strided.mix.weight.stride() == (1, 64)
    assert strided.up.weight.stride() == (128, 2)
    assert strided.down.weight.storage_offset() == 17
    assert KINDS["plain-expanded"].build()[0].blocks[0].wide.stride() == (0, 1)
    conv = KINDS["plain-channels-last"].build()[0].blocks[0].conv.weight
    assert conv.is_contiguous(memory_format=torch.channels_last) and not conv.is_contiguous()


@pytest.mark.parametrize("operation", ["cpu", "pin_memory", "is_pinned", "clone"])
def test_bare_has_no_such_operation(operation: str) -> None:
    weight = KINDS["own-bare"].build()[0].proj_in.weight
    if operation == "cpu":  # already there, so torch answers by itself; the copy is what is missing
        with pytest.raises(NotImplementedError):
            weight.to(torch.float64)
    else:
        with pytest.raises((NotImplementedError, RuntimeError)):
            getattr(weight, operation)()


@pytest.mark.parametrize("wrapper", [repack.HostNibbles, repack.SwizzledNibbles, repack.HostOnlyNibbles])
def test_packings_hold_the_same_codes(wrapper: type[repack._Nibbles]) -> None:
    codes = torch.randint(0, 16, (8, 6), dtype=torch.uint8)
    assert torch.equal(repack.unpack_rows(repack.pack_rows(codes)), codes)
    assert torch.equal(repack.unpack_tiles(repack.pack_tiles(codes)), codes)
    assert repack.pack_rows(codes).numel() == repack.pack_tiles(codes).numel()
    scale, low = torch.rand(8, 1) + 0.5, torch.rand(8, 1)
    device_side = repack.DeviceNibbles.pack(codes, scale, low)
    assert torch.equal(wrapper.pack(codes, scale, low).dequantise(), device_side.dequantise())


def test_refusals_are_clear() -> None:
    weight = torch.randn(8, 8)
    with pytest.raises(NotImplementedError, match="cannot move to meta"):
        repack.HostOnlyNibbles.quantise(weight).to("meta")
    assert repack.HostNibbles.quantise(weight).to("meta").__class__ is repack.DeviceNibbles
    with pytest.raises(NotImplementedError, match="cannot move to cpu"):
        repack.DeviceOnlyNibbles.quantise(weight)._cross(torch.device("cpu"))


@pytest.mark.parametrize("name", ["own-movable", "own-three-deep", "own-repack-class", "own-repack-bytes"])
def test_an_in_place_write_counts_on_the_wrapper_only(name: str) -> None:
    """Whoever asks `_version` whether a wrapper changed must ask the wrapper too, not only its leaves."""
    (first, _), (second, _) = KINDS[name].build(seed=0), KINDS[name].build(seed=1)
    weight = first.proj_in.weight
    counts = {path: part._version for path, part in contract.walk(weight)}
    first.load_state_dict(second.state_dict())
    assert contract.same_state_dict_bytes(first.state_dict(), second.state_dict()) == []
    now = {path: part._version for path, part in contract.walk(weight)}
    assert [path for path in now if now[path] != counts[path]] == [""]


def test_reason_names_what_is_missing() -> None:
    def never(device: object, seed: int) -> tuple[Any, torch.Tensor]:
        raise AssertionError("built although a module is missing")

    missing = Kind("x", "x", never, needs=("no_such_module_here",))
    assert (missing.reason() or "").startswith("import no_such_module_here: ModuleNotFoundError")
    assert KINDS["own-host-only"].reason("meta") == "not made on the accelerator"
    assert "no CPU kernel" in (KINDS["own-device-only"].runs() or "")


def test_own_wrappers_close_to_the_dense_weight() -> None:
    weight = torch.randn(48, 64)
    for wrapper, bound in ((own.Movable, 0.02), (own.Nested, 0.02), (own.Deep, 0.05), (repack.HostNibbles, 0.4)):
        assert (wrapper.quantise(weight).dequantise() - weight).abs().max() < bound
