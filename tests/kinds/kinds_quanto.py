"""optimum-quanto weights, quantised and frozen as its README says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from .catalogue import Built, Device, Kind
from .models import Stack, build_stack


def _quanto(name: str, qtype: str, *tags: str, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> Kind:
    def quantise(model: nn.Module) -> None:
        from optimum import quanto

        quanto.quantize(model, weights=getattr(quanto, qtype))
        quanto.freeze(model)

    def build(device: Device, seed: int) -> Built:
        return build_stack(lambda: Stack(width), device, seed, dtype, quantise=quantise)

    return Kind(f"quanto-{name}", "optimum-quanto", build, tags=frozenset({"wrapper", *tags}), needs=("optimum.quanto",))


def kinds() -> Iterator[Kind]:
    """Yield quanto's kinds; above width 128 the group size is 128, which the repacking classes ask for."""
    yield _quanto("qint8", "qint8")
    yield _quanto("qint8-fp16", "qint8", dtype=torch.float16)
    yield _quanto("qint4", "qint4")
    yield _quanto("qint2", "qint2")
    yield _quanto("qfloat8", "qfloat8", "repack")
    yield _quanto("qfloat8-e5m2", "qfloat8_e5m2")
    yield _quanto("qint4-tinygemm", "qint4", "repack", width=256)
    yield _quanto("qint4-fp32", "qint4", width=256, dtype=torch.float32)
    yield _quanto("qint4-awq", "qint4", "repack", width=256, dtype=torch.float16)
    yield _quanto("qfloat8-marlin", "qfloat8_e4m3fn", "repack", "outside", width=256, dtype=torch.float16)
