"""The base model of the catalogue: a stack of blocks with the pieces that offloading treats differently.

A `Stack` has root-level projections, a loose root parameter and a root buffer around an `nn.ModuleList` of blocks;
a block has a LayerNorm, linears with and without bias, a loose parameter, a buffer and a non-persistent buffer, and
every one of them takes part in the result. A wrong or stale byte anywhere therefore changes the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# More than 32 rows: for fewer, quanto 0.2.7 runs an AWQ kernel whose semaphores start uninitialised, so its result is not repeatable.
SEQUENCE = 24
BATCH = 2


Change = Callable[[nn.Module], object]


class Interrupted(RuntimeError):
    """Raised by a block in the middle of its forward when `Stack.fail_at` names it."""


class Block(nn.Module):
    """One residual block; `fail` makes its forward raise half-way, with its weights in use."""

    shift: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fail = False
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.gate = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width))
        self.register_buffer("scratch", torch.empty(width), persistent=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first half of the block's work: everything in front of the gated residual."""
        hidden = self.mix(self.norm(x)) + self.shift
        hidden = self.up(hidden)
        if self.fail:
            raise Interrupted("the block was told to fail")
        return self.down(F.gelu(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.attend(x) + self.scratch


class Stack(nn.Module):
    """Projection in, four blocks, projection out, with a loose parameter and a buffer at the root.

    `plan` is the order in which blocks run: leave one out, name one twice, or reverse it, between two forwards.
    """

    offset: torch.Tensor

    def __init__(self, width: int = 64, depth: int = 4, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.width = width
        self.plan: Sequence[int] | None = None
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.proj_out = nn.Linear(width, width, bias=False)
        self.loose = nn.Parameter(torch.empty(width))
        self.register_buffer("offset", torch.empty(width))

    @property
    def fail_at(self) -> int | None:
        """Index of the block that raises `Interrupted` half-way, or None."""
        return next((i for i, block in enumerate(self.blocks) if getattr(block, "fail", False)), None)

    @fail_at.setter
    def fail_at(self, index: int | None) -> None:
        block: Any
        for i, block in enumerate(self.blocks):
            block.fail = i == index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x) * self.loose + self.offset
        for index in range(len(self.blocks)) if self.plan is None else self.plan:
            x = self.blocks[index](x)
        return self.proj_out(x)

    def make_input(self, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an input whose bytes depend on `seed` alone, not on the device."""
        return make_input(self, self.width, seed, device, dtype)


class OnlyList(nn.Module):
    """A root whose only child is a ModuleList: nothing at the root ever runs a hook of its own."""

    def __init__(self, width: int = 64, depth: int = 4, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))

    fail_at = Stack.fail_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    make_input = Stack.make_input


class OnlyLoose(nn.Module):
    """A root with parameters and a buffer of its own and no child at all."""

    offset: torch.Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Parameter(torch.empty(width, width))
        self.second = nn.Parameter(torch.empty(width, width))
        self.register_buffer("offset", torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.first + self.offset) @ self.second

    make_input = Stack.make_input


def make_input(
    model: nn.Module, width: int, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a (batch, sequence, width) tensor from a CPU generator, in the model's dtype unless told otherwise."""
    generator = torch.Generator("cpu").manual_seed(1000 + seed)
    value = torch.randn(BATCH, SEQUENCE, width, generator=generator)
    return value.to(dtype or getattr(model, "compute_dtype", torch.float32)).to(device)


def fill(model: nn.Module, seed: int) -> None:
    """Give every floating-point parameter and buffer values that depend on `seed` and on its place, in place."""
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_(_scaled(name, noise))


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if noise.dim() >= 2:
        return noise / math.sqrt(max(1, math.prod(noise.shape[1:])))
    if name.endswith("running_var"):
        return 1 + noise.abs()
    if name.endswith(("norm.weight", "gate", "loose")):
        return 1 + 0.1 * noise
    return 0.1 * noise


def build_stack(
    make: Callable[[], nn.Module] = Stack,
    device: str | torch.device = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    finish: Change | None = None,
    quantise: Change | None = None,
) -> tuple[Any, torch.Tensor]:
    """Construct, fill and cast a model on the CPU, move it to `device`, and return it with an input on the CPU.

    `finish` makes a last change on the CPU (strides, ties); `quantise` works where the model then is.
    """
    model: Any = make()
    fill(model, seed)
    model = model.to(dtype).eval()
    model.compute_dtype = dtype
    if finish is not None:
        finish(model)
    model = model.to(device)
    if quantise is not None:
        quantise(model)
    annotate(model)
    return model, model.make_input()


def annotate(model: nn.Module) -> None:
    """Put the attributes that loaders leave on parameters, so that losing one is seen."""
    parameter: Any
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter._is_hf_initialized = True
        parameter.note = {"name": name, "index": index}
