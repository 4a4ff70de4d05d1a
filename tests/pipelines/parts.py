"""What the tiny pipelines are made of: their form, and the parts that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .autoencoders import NAMED as AUTOENCODERS
from .weights import made, quantise

WIDTH, TOKENS = 32, 8


@dataclass(frozen=True)
class Pipeline:
    """One pipeline.

    Attributes:
        construct: makes it on the CPU, in float32.
        call: runs it: `call(pipe, device, generator)` returns images or frames as a tensor.
        quantised: the components that are quantised if that is asked for.
    """

    name: str
    construct: Callable[[], Any]
    call: Callable[[Any, torch.device, torch.Generator], torch.Tensor]
    quantised: tuple[str, ...] = ("transformer",)

    def build(self, weights: str = "plain") -> Any:
        """The pipeline on the CPU, with its denoisers' linears quantised as `weights` says."""
        pipe = self.construct()
        pipe.set_progress_bar_config(disable=True)
        for name in self.quantised:
            quantise(getattr(pipe, name), weights)
        return pipe

    def run(self, pipe: Any, device: torch.device, seed: int = 0) -> torch.Tensor:
        """One call, as a tensor on the CPU; it follows from `seed`, whatever the device."""
        with torch.no_grad():
            return self.call(pipe, device, torch.Generator().manual_seed(seed)).cpu()


def modules(pipe: Any) -> dict[str, torch.nn.Module]:
    """The components that have weights."""
    return {name: value for name, value in pipe.components.items() if isinstance(value, torch.nn.Module)}


def numbers(device: torch.device, *shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def absent(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


def flow() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def kl(**more: Any) -> Any:
    import diffusers

    config = {"latent_channels": 4, "use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.06, "scaling_factor": 1.5}
    return made(lambda: diffusers.AutoencoderKL(**{**AUTOENCODERS["AutoencoderKL"].config, **config, **more}))
