"""Values for tiny models, and quantising them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from diffusers_offload_fix.check import pipeline


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that follow from `seed`, and leave those of the caller alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def made(build: Callable[[], Any], seed: int = 0) -> Any:
    """A model in evaluation mode that wants no gradients; zero-initialised layers get values, so that each of them counts."""
    with seeded(seed):
        model = build()
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return model.eval().requires_grad_(False)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's plain parameters and buffers."""
    return sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


#: What the denoisers' linears can be made of.
KINDS = ("plain", "torchao-int8", "quanto-qint8")


def quantise(model: nn.Module, weights: str) -> None:
    """Quantises a model's linears in place, as a user of the library would."""
    if weights not in KINDS:
        raise ValueError(f"weights of the kind {weights!r} are not known: use {', '.join(KINDS)}")
    pipeline.quantise(model, weights, _is_wide)


def _is_wide(module: nn.Module, name: str) -> bool:
    # torch's int8 kernel for the CPU reads past the end of rows that are much shorter.
    return isinstance(module, nn.Linear) and module.in_features >= 32
