"""Wrapper subclasses whose bytes depend on the device, as the kernels of quanto, torchao and others require.

They stand in for packings that only CUDA has, so that moving them is tested without one. A move of the raw leaves
across device types, without the class's own `.to()`, gives numbers that are wrong, never an error.
"""

from __future__ import annotations

from typing import Any

import torch

from .own import Wrapper


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes two a byte: the low nibble is the even column."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_rows`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).reshape(packed.shape[0], -1)


def pack_tiles(codes: torch.Tensor) -> torch.Tensor:
    """Pack the transposed codes, low nibble from the second half of the rows: same byte count, other order."""
    half = codes.shape[0] // 2
    return (codes[half:] | (codes[:half] << 4)).t().contiguous()


def unpack_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_tiles`."""
    both = packed.t()
    return torch.cat([both >> 4, both & 15]).contiguous()


def _is_host(device: torch.device | str | None) -> bool:
    return torch.device(device or "cpu").type == "cpu"


class _Nibbles(Wrapper):
    """4-bit codes with a scale and a minimum a row; subclasses choose the packing."""

    _leaves = ("packed", "scale", "low")
    _copies = True

    @staticmethod
    def __new__(cls: type[Any], packed: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, shape: Any) -> Any:
        return Wrapper._outer(cls, packed, torch.Size(shape), scale.dtype)

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, shape: Any) -> None:
        self.packed = packed
        self.scale = scale
        self.low = low

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` rounded to 16 levels a row, packed for the CPU."""
        wide = weight.float()
        low = wide.amin(1, keepdim=True)
        scale = (wide.amax(1, keepdim=True) - low) / 15
        codes = ((wide - low) / scale).round().clamp(0, 15).to(torch.uint8)
        return cls.pack(codes, scale.to(weight.dtype), low.to(weight.dtype))

    @classmethod
    def pack(cls, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        return cls(pack_rows(codes), scale, low, codes.shape)

    def codes(self) -> torch.Tensor:
        return unpack_rows(self.packed)

    def dequantise(self) -> torch.Tensor:
        return self.codes().to(self.scale.dtype) * self.scale + self.low

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self._leaves), {"shape": tuple(self.shape)}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["packed"], inner["scale"], inner["low"], context["shape"])

    def _copy(self, func: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        device = kwargs.get("device")
        if device is None or _is_host(device) == _is_host(self.device):
            return super()._copy(func, kwargs)
        return self._cross(torch.device(device))

    def _cross(self, device: torch.device) -> torch.Tensor:
        raise NotImplementedError

    def _carry(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes().to(device), self.scale.to(device), self.low.to(device)


class HostNibbles(_Nibbles):
    """The CPU packing; `.to(accelerator)` returns a `DeviceNibbles`, as quanto picks a class for the device."""

    def _cross(self, device: torch.device) -> torch.Tensor:
        return DeviceNibbles.pack(*self._carry(device))


class DeviceNibbles(_Nibbles):
    """The accelerator packing, with a workspace that `__tensor_flatten__` does not list; `.to("cpu")` goes back."""

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, shape: Any) -> None:
        super().__init__(packed, scale, low, shape)
        self._workspace = torch.zeros(4, dtype=torch.int32, device=packed.device)

    @classmethod
    def pack(cls, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        return cls(pack_tiles(codes), scale, low, codes.shape)

    def codes(self) -> torch.Tensor:
        if self._workspace.device != self.packed.device:
            raise RuntimeError(f"the workspace is on {self._workspace.device}, the weight on {self.packed.device}")
        return unpack_tiles(self.packed)

    def _cross(self, device: torch.device) -> torch.Tensor:
        return HostNibbles.pack(*self._carry(device))


class SwizzledNibbles(_Nibbles):
    """One class, two packings: which one the bytes have follows from the device they are on (as TinyGemm does)."""

    @classmethod
    def pack(cls, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        pack = pack_rows if _is_host(codes.device) else pack_tiles
        return cls(pack(codes), scale, low, codes.shape)

    def codes(self) -> torch.Tensor:
        return unpack_rows(self.packed) if _is_host(self.packed.device) else unpack_tiles(self.packed)

    def _cross(self, device: torch.device) -> torch.Tensor:
        return type(self).pack(*self._carry(device))


class HostOnlyNibbles(_Nibbles):
    """A packing that only CPU kernels read; it refuses every other device, and moved leaves give wrong numbers."""

    def codes(self) -> torch.Tensor:
        codes = unpack_rows(self.packed)
        return codes if _is_host(self.packed.device) else codes.flip(0)

    def _cross(self, device: torch.device) -> torch.Tensor:
        raise NotImplementedError(f"HostOnlyNibbles is packed for CPU kernels and cannot move to {device}")


class DeviceOnlyNibbles(_Nibbles):
    """A packing that only accelerator kernels read; it refuses `.to("cpu")`, yet its leaves move and come back."""

    @classmethod
    def pack(cls, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        return cls(pack_tiles(codes), scale, low, codes.shape)

    def codes(self) -> torch.Tensor:
        if _is_host(self.packed.device):
            raise RuntimeError("DeviceOnlyNibbles has no CPU kernel")
        return unpack_tiles(self.packed)

    def _cross(self, device: torch.device) -> torch.Tensor:
        if _is_host(device):
            raise NotImplementedError("DeviceOnlyNibbles is packed for the accelerator and cannot move to cpu")
        return Wrapper._copy(self, torch.ops.aten._to_copy.default, {"device": device})
