"""Stand-ins for weights: tensors that only say where they are. A probe needs no accelerator and no torchao with them.

Each is a real `torch.Tensor` subclass over an empty tensor, so that `nn.Module`, `nn.Parameter`, `isinstance` and
`swap_tensors` treat it as one, but its device, and that of the data in it, are plain attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class Leaf:
    """The data inside a weight: on which device it is, whether it is pinned, and a value to tell copies apart."""

    def __init__(self, device: torch.device, pinned: bool = False, value: int = 0, extra: bool = True) -> None:
        self.device, self.pinned, self.value, self.extra = device, pinned, value, extra
        self.log: Any = None

    def record_stream(self, stream: object) -> None:
        self.log.recorded.append(stream)


class Weight(torch.Tensor):
    """A plain weight: setting `.data` replaces everything."""

    is_torchao = False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    notes: Any
    leaf: Leaf
    claimed: torch.device

    @classmethod
    def on(cls, device: torch.device | str, log: Any, **leaf: Any) -> Any:
        """A new weight whose data is on `device`."""
        return cls.around(Leaf(torch.device(device), **leaf), log)

    @classmethod
    def around(cls, leaf: Leaf, log: Any, claimed: torch.device | None = None) -> Any:
        weight = torch.Tensor._make_subclass(cls, torch.empty(0))
        weight.notes, weight.leaf, weight.claimed = log, leaf, claimed or leaf.device
        leaf.log = log
        return weight

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.claimed

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        self.claimed, self.leaf = other.claimed, other.leaf

    def detach(self) -> Any:
        return type(self).around(self.leaf, self.notes, self.claimed)

    def to(self, device: Any, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        device = torch.device(device)
        if device == self.leaf.device:
            return self
        leaf = Leaf(device, value=self.leaf.value, extra=self.leaf.extra)
        self.notes.copied(leaf, non_blocking or (len(args) > 1 and bool(args[1])))
        return type(self).around(leaf, self.notes)

    def cpu(self, *args: Any) -> Any:
        return self.to("cpu")

    def pin_memory(self, device: Any = None) -> Any:
        if self.leaf.pinned:
            return self
        return type(self).around(Leaf(self.leaf.device, True, self.leaf.value, self.leaf.extra), self.notes)

    def is_pinned(self, device: Any = None) -> bool:
        return self.leaf.pinned

    def record_stream(self, stream: object) -> None:
        self.leaf.record_stream(stream)


class Wrapper(Weight):
    """A quantised weight of any library: setting `.data` moves the outer tensor and leaves the data where it was."""

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        self.claimed = other.claimed

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["leaf"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Leaf], *args: Any) -> Any:
        return cls.around(inner["leaf"], inner["leaf"].log)


class TorchAO(Wrapper):
    """A weight of torchao, as upstream tells it from others: its data are the attributes that the class names."""

    is_torchao = True
    tensor_data_names: ClassVar = ["leaf"]


class Unpinnable(TorchAO):
    """As most of torchao's classes: it has no kernel for pinning."""

    def pin_memory(self, device: Any = None) -> Any:
        raise NotImplementedError("aten._pin_memory")

    def is_pinned(self, device: Any = None) -> bool:
        raise NotImplementedError("aten.is_pinned")


class Forgetful(TorchAO):
    """As `Int8Tensor` of torchao 0.16 and 0.17: pinning drops the optional scale."""

    def pin_memory(self, device: Any = None) -> Any:
        return self.around(Leaf(self.leaf.device, True, self.leaf.value, extra=False), self.notes)


class NoInference(TorchAO):
    """As every torchao class: it cannot be moved under `torch.inference_mode()`."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return super().to(*args, **kwargs)


class Dequantising(Wrapper):
    """As quanto's weights: pinning gives a plain, dequantised tensor."""

    def pin_memory(self, device: Any = None) -> Any:
        return Weight.around(Leaf(self.leaf.device, True, self.leaf.value), self.notes)
