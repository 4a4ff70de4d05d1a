"""Dense tensors: dtypes, strides, ties, sizes, changing buffers and the shapes of the module tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from . import variants as v
from .catalogue import Built, Device, Kind
from .models import Block, Change, OnlyList, OnlyLoose, Stack, build_stack


def _plain(
    name: str,
    make: Callable[[], nn.Module] = Stack,
    *tags: str,
    finish: Change | None = None,
    dtype: torch.dtype = torch.float32,
) -> Kind:
    def build(device: Device, seed: int) -> Built:
        return build_stack(make, device, seed, dtype, finish)

    return Kind(f"plain-{name}", "torch", build, ("cpu",), frozenset(tags))


def _blocks(block: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(block=block)


def kinds() -> Iterator[Kind]:
    """Yield the kinds that need nothing but torch."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield _plain(str(dtype).removeprefix("torch."), dtype=dtype)
    yield _plain("frozen", finish=lambda model: model.requires_grad_(False), dtype=torch.bfloat16)
    yield _plain("mixed-dtypes", finish=v.mixed_dtypes, dtype=torch.bfloat16)
    yield _plain("channels-last", _blocks(v.ConvBlock), "strides", finish=v.channels_last)
    yield _plain("strided", Stack, "strides", finish=v.restride)
    yield _plain("expanded", _blocks(v.ExpandedBlock), "strides", finish=v.expand)
    yield _plain("shared-storage", Stack, "strides", finish=v.share_storage)
    yield _plain("odd-sizes", _blocks(v.OddSizeBlock))
    yield _plain("tied-in-block", _blocks(v.TiedBlock), "tied")
    yield _plain("tied-neighbours", v.tied_neighbours, "tied")
    yield _plain("tied-root", v.tied_root, "tied")
    yield _plain("tied-buffers", Stack, "tied", finish=v.tie_buffers)
    yield _plain("changing-buffers", _blocks(v.CountingBlock), "buffers")
    yield _plain("batch-norm", _blocks(v.BatchNormBlock), "buffers")
    yield _plain("no-parameters", v.no_parameters)
    yield _plain("only-list", OnlyList)
    yield _plain("only-loose", OnlyLoose)
    yield _plain("conditional", lambda: Stack(depth=6, block=Block), "order")
