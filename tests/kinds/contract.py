"""What must stay true of a model's tensors, as data that two moments can be compared by.

A fingerprint describes every parameter and buffer as a tree of leaves, and the tensors that modules keep elsewhere
(a quantisation state, an 8-bit matmul state). It reads by way of `__tensor_flatten__` and plain attributes, never
through an operation of the class itself, so a wrapper that lies about its device is seen for what it is.
"""

from __future__ import annotations

import copy
import enum
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MODULE_INTERNALS = ("forward", "training", "plan", "compute_dtype", "note")
_DEPTH = 4


@dataclass(frozen=True)
class Leaf:
    """A plain tensor somewhere inside a parameter, a buffer or a module."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Print:
    """One parameter or buffer, or the loose tensors of a module (`kind` is then "module")."""

    kind: str
    python_class: str
    is_parameter: bool
    requires_grad: bool
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device | None
    attributes: Mapping[str, Any]
    leaves: Mapping[str, Leaf]


Fingerprint = dict[str, Print]


def walk(tensor: torch.Tensor, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, wrapper or leaf) of a tensor's tree, the root first, tensors in attributes included."""
    yield path, tensor
    inner: list[str] = []
    if is_traceable_wrapper_subclass(tensor):
        inner = [n for n in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, n), torch.Tensor)]
        for name in inner:
            yield from walk(getattr(tensor, name), _join(path, name))
    for name, value in vars(tensor).items():
        if name not in inner:
            yield from _hidden(value, _join(path, name), _DEPTH)


def _hidden(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in attributes, lists and state objects; modules and tensors' grads are somebody else's."""
    if isinstance(value, torch.Tensor):
        yield from walk(value, path)
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _hidden(item, _join(path, str(key)), depth - 1)
    elif depth and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _hidden(item, _join(path, str(index)), depth - 1)
    elif depth and _is_state(value):
        for name, item in vars(value).items():
            yield from _hidden(item, _join(path, name), depth - 1)


def _is_state(value: Any) -> bool:
    if isinstance(value, nn.Module | type | enum.Enum) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith(("torch.distributed", "builtins"))


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)


def leaves(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, leaf) for every plain tensor of the tree; the root of a plain tensor has path ''."""
    return ((path, part) for path, part in walk(tensor) if not is_traceable_wrapper_subclass(part))


def read_bytes(leaf: torch.Tensor) -> bytes:
    """Return the logical bytes of a plain tensor, in row-major order, whatever its device and strides."""
    with torch.no_grad(), torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        host = torch.Tensor.detach(leaf).to("cpu").contiguous()
        if host.numel() == 0:
            return b""
        # one element may keep any stride, which a view as bytes refuses
        flat = host.as_strided((host.numel(),), (1,))
        return flat.view(torch.uint8).numpy().tobytes()


def describe(value: Any, depth: int = _DEPTH) -> Any:
    """Turn an attribute into something that compares by value; tensors are fingerprinted as leaves instead."""
    if isinstance(value, torch.Tensor):
        return "<tensor>"
    if isinstance(value, Mapping):
        return {str(key): describe(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item, depth - 1) for item in value]
    if isinstance(value, nn.Module):
        return f"<module {type(value).__name__}>"
    if callable(value):
        return f"<{getattr(value, '__qualname__', type(value).__name__)}>"
    if depth and _is_state(value):
        return {"<class>": type(value).__name__, **{k: describe(v, depth - 1) for k, v in vars(value).items()}}
    return repr(value)


def _leaf(tensor: torch.Tensor) -> Leaf:
    return Leaf(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device, read_bytes(tensor))


def _tensor_print(kind: str, tensor: torch.Tensor) -> Print:
    inner: list[str] = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else []
    attributes = {k: describe(v) for k, v in vars(tensor).items() if k not in inner and k != "_is_param"}
    return Print(
        kind=kind,
        python_class=type(tensor).__qualname__,
        is_parameter=isinstance(tensor, nn.Parameter),
        requires_grad=tensor.requires_grad,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        device=tensor.device,
        attributes=attributes,
        leaves={path: _leaf(part) for path, part in leaves(tensor)},
    )


def _module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that a module keeps outside its parameters and buffers, by path."""
    found: dict[str, torch.Tensor] = {}
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in _MODULE_INTERNALS:
            found.update(_hidden(value, name, _DEPTH))
    return found


def named_tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (kind, qualified name, tensor) of parameters and buffers, tied ones under each of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def fingerprint(model: nn.Module) -> Fingerprint:
    """Describe every tensor of the model, bytes included, without changing anything."""
    prints = {name: _tensor_print(kind, tensor) for kind, name, tensor in named_tensors(model)}
    for name, module in model.named_modules():
        outside = {p: _leaf(t) for p, t in _module_tensors(module).items() if not is_traceable_wrapper_subclass(t)}
        if outside:
            prints[f"{name}:state"] = Print("module", type(module).__qualname__, False, False, None, (), (), None, {}, outside)
    return prints


def diff(before: Fingerprint, after: Fingerprint, *, devices: bool = True) -> list[str]:
    """Say in words what differs; an empty list means that nothing does. `devices=False` ignores where bytes are."""
    found = [f"{name}: missing afterwards" for name in before.keys() - after.keys()]
    found += [f"{name}: new afterwards" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        found += [f"{name}: {text}" for text in _diff_prints(before[name], after[name], devices)]
    return sorted(found)


def _diff_prints(a: Print, b: Print, devices: bool) -> Iterator[str]:
    skipped = {"attributes", "leaves"} | (set() if devices else {"device"})
    for item in fields(Print):
        left, right = getattr(a, item.name), getattr(b, item.name)
        if item.name not in skipped and left != right:
            yield f"{item.name} was {left}, is {right}"
    for key in sorted(a.attributes.keys() | b.attributes.keys()):
        left, right = (p.attributes.get(key, "<absent>") for p in (a, b))
        if not devices:
            left, right = _placeless(left), _placeless(right)
        if left != right:
            yield f"attribute {key} was {left}, is {right}"
    for path in sorted(a.leaves.keys() | b.leaves.keys()):
        yield from _diff_leaves(f"leaf {path or '(itself)'}", a.leaves.get(path), b.leaves.get(path), devices)


def _placeless(value: Any) -> Any:
    """Drop devices from a described attribute: some classes keep theirs in a tuple or a string."""
    if isinstance(value, dict):
        return {key: _placeless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_placeless(item) for item in value]
    return "device" if isinstance(value, str) and value.startswith("device(") else value


def _diff_leaves(where: str, a: Leaf | None, b: Leaf | None, devices: bool) -> Iterator[str]:
    if a is None or b is None:
        yield f"{where} is {'new' if a is None else 'gone'}"
        return
    for name in ("dtype", "shape", "strides", *(("device",) if devices else ())):
        if getattr(a, name) != getattr(b, name):
            yield f"{where}: {name} was {getattr(a, name)}, is {getattr(b, name)}"
    if a.data != b.data:
        first = next((i for i, (x, y) in enumerate(zip(a.data, b.data, strict=False)) if x != y), None)
        at = "" if first is None else f", the first at byte {first}"
        yield f"{where}: {sum(x != y for x, y in zip(a.data, b.data, strict=False))} bytes differ{at}"


def leaves_off(model: nn.Module, device: str | torch.device) -> list[str]:
    """Name what is not on `device`: leaves, loose module tensors, and wrappers whose device is not their leaves'."""
    wanted = torch.device(device)
    found: list[str] = []
    for _, name, tensor in named_tensors(model):
        found += [f"{_join(name, path)} is on {part.device}" for path, part in walk(tensor) if _off(part, wanted)]
        found += [f"{_join(name, path)} {lie}" for path, part in walk(tensor) for lie in _lies(part)]
    for name, module in model.named_modules():
        tensors = _module_tensors(module).items()
        found += [f"{_join(name, path)} is on {t.device}" for path, t in tensors if _off(t, wanted)]
    return found


def _off(tensor: torch.Tensor, wanted: torch.device) -> bool:
    return _apart(tensor.device, wanted)


def _lies(tensor: torch.Tensor) -> Iterator[str]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor) and _apart(inner.device, tensor.device):
                yield f"says {tensor.device}, but its {name} is on {inner.device}"


def _apart(a: torch.device, b: torch.device) -> bool:
    """Compare devices; a class that was told "cuda" says so without an index, which is no lie."""
    return a.type != b.type or (None not in (a.index, b.index) and a.index != b.index)


def snapshot_ids(model: nn.Module) -> dict[str, int]:
    """Return the identity of every parameter, by name; buffers are excluded, since a forward may replace them."""
    return {name: id(tensor) for kind, name, tensor in named_tensors(model) if kind == "parameter"}


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return groups of names that are one object, so that a broken tie is seen."""
    names: dict[int, list[str]] = {}
    for _, name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return sorted(tuple(group) for group in names.values() if len(group) > 1)


def same_state_dict_bytes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Say in which keys, classes, layouts or bytes two state dicts differ; where the bytes are does not matter."""
    found = [f"only in the first: {key}" for key in a.keys() - b.keys()]
    found += [f"only in the second: {key}" for key in b.keys() - a.keys()]
    for key in sorted(a.keys() & b.keys()):
        left, right = a[key], b[key]
        if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
            if describe(left) != describe(right):
                found.append(f"{key}: {describe(left)} against {describe(right)}")
            continue
        if type(left) is not type(right):
            found.append(f"{key}: {type(left).__qualname__} against {type(right).__qualname__}")
        ours, theirs = ({p: _leaf(t) for p, t in leaves(x)} for x in (left, right))
        for path in sorted(ours.keys() | theirs.keys()):
            found += _diff_leaves(_join(key, path), ours.get(path), theirs.get(path), devices=False)
    return found


def saved_size(model: nn.Module) -> int:
    """Return how many bytes `torch.save(model.state_dict())` writes: a whole slab a view would show here."""
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    return stream.tell()


def persistence(model: nn.Module) -> dict[str, Any]:
    """Try what users do with a model at rest; a value is a fingerprint, a size, or the error of a refusal.

    Compare the result of an offloaded model with that of one that never was: a class that refuses `deepcopy` by
    itself is then no failure, and one that works only without offloading is.
    """
    return {
        "state_dict": _attempt(lambda: _state_print(model.state_dict())),
        "detach": _attempt(lambda: {n: type(p.detach()).__qualname__ for n, p in model.named_parameters()}),
        "deepcopy": _attempt(lambda: fingerprint(copy.deepcopy(model).cpu())),
        "pickle": _attempt(lambda: {n: len(pickle.dumps(p)) for n, p in model.named_parameters()}),
        "torch.save": _attempt(lambda: saved_size(model)),
    }


def _state_print(state: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {key: {path: read_bytes(leaf) for path, leaf in leaves(value)} for key, value in tensors.items()}


def _attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # the refusal itself is the result
        return f"{type(error).__name__}: {str(error)[:120]}"
