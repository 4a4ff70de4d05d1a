"""Wrapper subclasses that belong to no library, so that the code under test cannot know them by name.

Each keeps its bytes in inner tensors and tells about them only through `__tensor_flatten__`. What they leave out is
the point: `Bare` can be neither copied nor pinned, others nest, use `__slots__`, or carry python attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

aten = torch.ops.aten
_REWRAP = (aten.detach.default, aten.alias.default)
_COMPUTE = (
    aten.linear.default,
    aten.t.default,
    aten.transpose.int,
    aten.mm.default,
    aten.addmm.default,
    aten.matmul.default,
)
_COPY = (aten._to_copy.default, aten.clone.default)


class Wrapper(torch.Tensor):
    """Base of the family: a subclass names its inner tensors and says how to dequantise, nothing else works."""

    _leaves: tuple[str, ...] = ()
    _copies = False

    @staticmethod
    def _outer(cls: type[Any], like: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)

    def dequantise(self) -> torch.Tensor:
        raise NotImplementedError

    def _inner(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self._leaves if getattr(self, name) is not None}

    def _rebuild(self, inner: dict[str, torch.Tensor]) -> torch.Tensor:
        _, context = self.__tensor_flatten__()
        return type(self).__tensor_unflatten__(inner, context, self.shape, self.stride())

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self._inner()), {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _REWRAP:
            return args[0]._rebuild({name: func(leaf) for name, leaf in args[0]._inner().items()})
        if func in _COPY and cls._copies:
            return args[0]._copy(func, kwargs)
        if func is aten.copy_.default and cls._copies:
            return _write(args[0], args[1])
        if func in _COMPUTE:
            dense = [a.dequantise() if isinstance(a, Wrapper) else a for a in args]
            return func(*dense, **kwargs)
        raise NotImplementedError(f"{cls.__name__} does not implement {func}")

    def _copy(self, func: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        if kwargs.get("dtype") not in (None, self.dtype):
            raise NotImplementedError(f"the dtype of a {type(self).__name__} cannot change")
        kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "layout", "pin_memory")}
        return self._rebuild({name: func(leaf, **kwargs) for name, leaf in self._inner().items()})


def _write(target: Any, source: Any) -> Any:
    """Copy leaf by leaf; torch then counts the write on the wrapper, not on its leaves."""
    if not isinstance(source, Wrapper):
        raise NotImplementedError(f"a {type(target).__name__} takes no dense values")
    if source.device.type != target.device.type:
        source = source.to(target.device)
    if type(source) is not type(target):
        raise NotImplementedError(f"a {type(target).__name__} takes no {type(source).__name__}")
    for name, leaf in target._inner().items():
        leaf.copy_(getattr(source, name))
    return target


class Bare(Wrapper):
    """An int8 weight with a scale a row; it can be wrapped in a Parameter and multiplied, and that is all."""

    _leaves = ("qdata", "scale")

    @staticmethod
    def __new__(cls: type[Any], qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        return Wrapper._outer(cls, qdata, qdata.shape, scale.dtype)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata = qdata
        self.scale = scale

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` rounded to int8 with a scale a row."""
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return cls((weight.float() / scale).round().to(torch.int8), scale.to(weight.dtype))

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["qdata"], inner["scale"])

    def dequantise(self) -> torch.Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale


class Movable(Bare):
    """`Bare` with `.to`, `clone` and `copy_`; still no pin_memory, is_pinned or record_stream."""

    _copies = True


class Slotted(Movable):
    """Inner tensors in `__slots__`, so that `__dict__` does not show them."""

    __slots__ = ("qdata", "scale")


class Attributed(Movable):
    """Python attributes: one that the flatten context carries, and others that it does not."""

    @staticmethod
    def __new__(cls: type[Any], qdata: torch.Tensor, scale: torch.Tensor, block: int = 32) -> Any:
        return Bare.__new__(cls, qdata, scale)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor, block: int = 32) -> None:
        super().__init__(qdata, scale)
        self.block = block

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> torch.Tensor:
        made = super().quantise(weight)
        made.quant_type = "own"
        made.history = ["quantised", {"rows": weight.shape[0]}]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["qdata", "scale"], {"block": self.block}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["qdata"], inner["scale"], context["block"])


class Nested(Wrapper):
    """Two levels: another wrapper and a plain shift a row."""

    _leaves = ("inside", "row_shift")
    _copies = True

    @staticmethod
    def __new__(cls: type[Any], inside: torch.Tensor, row_shift: torch.Tensor) -> Any:
        return Wrapper._outer(cls, row_shift, inside.shape, inside.dtype)

    def __init__(self, inside: torch.Tensor, row_shift: torch.Tensor) -> None:
        self.inside = inside
        self.row_shift = row_shift

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` as a row mean and a quantised rest."""
        mean = weight.float().mean(1, keepdim=True).to(weight.dtype)
        return cls(Movable.quantise(weight - mean), mean)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inside"], inner["row_shift"])

    def dequantise(self) -> torch.Tensor:
        return self.inside.dequantise() + self.row_shift


class Deep(Wrapper):
    """Three levels, with a leaf that may be None and is then left out of the flattened names."""

    _leaves = ("nested", "column_scale")
    _copies = True

    @staticmethod
    def __new__(cls: type[Any], nested: torch.Tensor, column_scale: torch.Tensor | None = None) -> Any:
        return Wrapper._outer(cls, nested, nested.shape, nested.dtype)

    def __init__(self, nested: torch.Tensor, column_scale: torch.Tensor | None = None) -> None:
        self.nested = nested
        self.column_scale = column_scale

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` in three levels; only wide weights get a scale a column."""
        if weight.shape[1] <= weight.shape[0]:
            return cls(Nested.quantise(weight))
        columns = weight.float().abs().amax(0, keepdim=True).to(weight.dtype)
        return cls(Nested.quantise(weight / columns), columns)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["nested"], inner.get("column_scale"))

    def dequantise(self) -> torch.Tensor:
        dense = self.nested.dequantise()
        return dense if self.column_scale is None else dense * self.column_scale


def linears(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield every linear: the layers that quantisation libraries replace by default."""
    return (module for module in model.modules() if isinstance(module, nn.Linear))


def quantise_with(wrapper: type[Any], model: nn.Module) -> nn.Module:
    """Replace the weights by `wrapper` ones on the same device; their bytes come from the CPU either way."""
    for linear in linears(model):
        device = linear.weight.device
        made = place(wrapper.quantise(linear.weight.detach().cpu()), device)
        linear.weight = nn.Parameter(made, requires_grad=False)
        for name, value in vars(made).items():
            if not isinstance(value, torch.Tensor):
                setattr(linear.weight, name, value)
    return model


def place(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Move a wrapper with its attributes; one that cannot copy itself is rebuilt over moved leaves."""
    if torch.device(device) == tensor.device:
        return tensor
    if not isinstance(tensor, Wrapper):
        return tensor.to(device)
    if tensor._copies:
        made = tensor.to(device)
    else:
        made = tensor._rebuild({name: place(leaf, device) for name, leaf in tensor._inner().items()})
    vars(made).update({k: v for k, v in vars(tensor).items() if not isinstance(v, torch.Tensor)})
    return made
