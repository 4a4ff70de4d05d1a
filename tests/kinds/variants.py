"""Variants of the base model: ties, changing buffers, odd sizes and strides, each the smallest that shows its point."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .models import Block, Stack


class TiedBlock(Block):
    """Two linears of one block share a weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.mix.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.5 * self.again(x)


class CountingBlock(Block):
    """Buffers that forward changes: a 0-dim counter, a running mean in place, and one that is replaced."""

    calls: torch.Tensor
    mean: torch.Tensor
    last: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("last", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) + self.mean + 0.25 * self.last
        self.calls.add_(1)
        self.mean.mul_(0.75).add_(0.25 * x.detach().mean((0, 1)).to(self.mean.dtype))
        self.last = out[0, 0].detach().clone()
        return out * (1 + 0.01 * self.calls).to(out.dtype)


class _TellingNorm(nn.BatchNorm1d):
    """A batch norm whose running statistics are part of its output, so that a stale one is seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = super().forward(x)
        assert self.running_mean is not None and self.running_var is not None
        return normal + 0.1 * (self.running_mean + self.running_var)[:, None].to(x.dtype)


class BatchNormBlock(Block):
    """BatchNorm in train mode: running statistics and `num_batches_tracked` move with every forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.batch_norm: Any = _TellingNorm(width)

    def train(self, mode: bool = True) -> BatchNormBlock:
        super().train(mode)
        self.batch_norm.train(True)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class OddSizeBlock(Block):
    """Zero-size and 0-dim parameters and buffers."""

    empty_buffer: torch.Tensor
    scalar_buffer: torch.Tensor
    flag: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.empty = nn.Parameter(torch.empty(0))
        self.hollow = nn.Parameter(torch.empty(0, width))
        self.scalar = nn.Parameter(torch.empty(()))
        self.register_buffer("empty_buffer", torch.empty(3, 0))
        self.register_buffer("scalar_buffer", torch.empty(()))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([x, self.hollow.expand(x.shape[0], 0, -1)], dim=1)
        out = super().forward(padded) * (1 + self.scalar) + self.scalar_buffer
        return torch.where(self.flag, out, -out) + self.empty.sum() + self.empty_buffer.sum()


class ExpandedBlock(Block):
    """Stride-0 tensors: one row of storage that reads as many."""

    wide_buffer: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.wide = nn.Parameter(torch.empty(1, width))
        self.register_buffer("wide_buffer", torch.empty(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.wide.mean(0) + self.wide_buffer.mean(0)


class ConvBlock(Block):
    """A channels_last convolution weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(x.shape[0], 16, 8, -1).contiguous(memory_format=torch.channels_last)
        return super().forward(x) + self.conv(image).reshape(x.shape)


class PlainPieces(nn.Module):
    """A block that holds no parameter and no buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.activation = nn.GELU()
        self.rest = nn.Sequential(nn.Identity(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.activation(x)) + x


def tied_neighbours() -> Any:
    """Blocks 0 and 1, and blocks 2 and 3, share a weight, so two groups in a row need the same bytes."""
    model: Any = Stack()
    for left, right in ((0, 1), (2, 3)):
        model.blocks[right].mix.weight = model.blocks[left].mix.weight
    return model


def tied_root() -> Any:
    """The first and last block use weights of the root, as tied embeddings do."""
    model: Any = Stack()
    model.blocks[0].mix.weight = model.proj_in.weight
    model.blocks[-1].mix.weight = model.proj_out.weight
    return model


def tie_buffers(model: Any) -> Any:
    """Make every block hold the same buffer object, as blocks that share rotary frequencies do."""
    for block in model.blocks:
        block.shift = model.blocks[0].shift
    return model


def no_parameters() -> Any:
    """Every second block has nothing to move."""
    model: Any = Stack()
    model.blocks[1] = PlainPieces(model.width)
    model.blocks[3] = PlainPieces(model.width)
    return model


def restride(model: Any) -> Any:
    """Give weights strides that a contiguous copy would lose: transposed, with gaps, and at an offset."""
    with torch.no_grad():
        for block in model.blocks:
            block.mix.weight = nn.Parameter(block.mix.weight.t().contiguous().t(), requires_grad=False)
            block.up.weight = nn.Parameter(_with_gaps(block.up.weight), requires_grad=False)
            block.down.weight = nn.Parameter(_at_offset(block.down.weight), requires_grad=False)
            block.shift = _with_gaps(block.shift)
    return model


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _at_offset(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.zeros(tensor.numel() + 24, dtype=tensor.dtype, device=tensor.device)
    flat[17 : 17 + tensor.numel()] = tensor.reshape(-1)
    return flat[17 : 17 + tensor.numel()].view(tensor.shape)


def share_storage(model: Any) -> Any:
    """Make weights of one block disjoint views of one storage, as a split fused projection is."""
    with torch.no_grad():
        for block in model.blocks:
            both = torch.cat([block.mix.weight, block.up.weight])
            block.mix.weight = nn.Parameter(both[: model.width], requires_grad=False)
            block.up.weight = nn.Parameter(both[model.width :], requires_grad=False)
    return model


def expand(model: Any) -> Any:
    """Turn one-row tensors into stride-0 ones."""
    for block in model.blocks:
        block.wide = nn.Parameter(block.wide.expand(4, -1), requires_grad=False)
        block.wide_buffer = block.wide_buffer.expand(4, -1)
    return model


def channels_last(model: Any) -> Any:
    """Store convolution weights channels_last."""
    for block in model.blocks:
        block.conv.weight = nn.Parameter(block.conv.weight.contiguous(memory_format=torch.channels_last), requires_grad=False)
    return model


def mixed_dtypes(model: Any) -> Any:
    """Keep norms in float32 inside a half-precision model, as many checkpoints do."""
    for block in model.blocks:
        norm = _CastingNorm(block.norm.normalized_shape)
        norm.load_state_dict(block.norm.state_dict())
        block.norm = norm
    return model


class _CastingNorm(nn.LayerNorm):
    """A norm that computes in float32 whatever comes in, with its own weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)
