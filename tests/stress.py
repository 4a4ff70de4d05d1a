"""A model whose slots wrap often, run in random orders while both streams are held up at random, beside the resident model.

Used on the simulated accelerator, where copies run as late as the ordering allows, and on a GPU, where sleeping kernels are what
makes a missing wait visible.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from diffusers_offload_fix import backend, idle, lane
from tests.kinds import contract
from tests.kinds.models import fill, make_input

#: Widths of the blocks' middle, in multiples of the model's: the arena is as long as two of the largest, so others wrap at odd places.
MIDDLES = (1, 6, 2, 5, 1, 3, 6, 2)
WIDTH = 64
QUANTS = ("none", "int8")
#: Arguments of `apply_group_offloading`, by name.
WAYS: dict[str, dict[str, Any]] = {
    "block+stream": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    "leaf+stream": {"offload_type": "leaf_level", "use_stream": True},
    "block+stream+low": {
        "offload_type": "block_level",
        "num_blocks_per_group": 1,
        "use_stream": True,
        "low_cpu_mem_usage": True,
    },
    "leaf+stream+low": {"offload_type": "leaf_level", "use_stream": True, "low_cpu_mem_usage": True},
}
Pause = Callable[[], object]
Enable = Callable[..., object]


class Middle(nn.Module):
    """A residual block of its own size; it is held up before it reads its first weight and before it reads its last."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, middle * width)
        self.down = nn.Linear(middle * width, width, bias=False)
        self.pause: Pause = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pause()
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        self.pause()
        return x + self.down(hidden)


class Uneven(nn.Module):
    """Projections around blocks of different sizes, which run in the order of `plan`."""

    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH
        self.proj_in = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Middle(WIDTH, middle) for middle in MIDDLES)
        self.proj_out = nn.Linear(WIDTH, WIDTH)
        self.plan: list[int] = list(range(len(MIDDLES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for index in self.plan:
            x = self.blocks[index](x)
        return self.proj_out(x)


def build(quant: str) -> Uneven:
    """The model on the CPU; the same bytes each time."""
    model = Uneven()
    fill(model, 5)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    if quant == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(version=2))
    return model


@contextlib.contextmanager
def held_up(pause: Pause) -> Iterator[None]:
    """Calls `pause` whenever the plugin has made its copy stream the current one; every unit goes through the arena."""
    original, small = backend.Streams.on, lane.SMALL

    @contextlib.contextmanager
    def on(self: backend.Streams, stream: Any) -> Iterator[None]:
        with original(self, stream):
            pause()
            yield

    streams: Any = backend.Streams
    streams.on, lane.SMALL = on, 0
    try:
        yield
    finally:
        streams.on, lane.SMALL = original, small


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """Takes the ordering away: events are never recorded, so that nobody waits for them."""
    streams: Any = backend.Streams
    original = streams.mark
    streams.mark = lambda self, stream, timed=False: self._module.Event()
    try:
        yield
    finally:
        streams.mark = original


def run(quant: str, way: str, device: torch.device, enable: Enable, pause: Pause, rounds: int, seed: int = 0) -> list[str]:
    """The faults of `rounds` forwards, each in another order of the blocks."""
    chance = random.Random(seed)
    resident, model = build(quant).to(device), build(quant)
    example = make_input(model, WIDTH, dtype=torch.bfloat16, device=device)
    block: Any
    for block in model.blocks:
        block.pause = pause
    faults = []
    with torch.no_grad(), held_up(pause), idle.loop():
        enable(model, device, **WAYS[way])
        for number in range(rounds):
            model.plan = resident.plan = plan(chance)
            got = model(example)
            if not torch.equal(got, resident(example)):
                faults.append(f"forward {number} differs, order {model.plan}")
            if chance.random() < 0.2:
                faults += [f"after forward {number}: {text}" for text in contract.leaves_off(model, "cpu")]
    return faults


def plan(chance: random.Random) -> list[int]:
    """An order of the blocks: as it is for a while, or some left out, some run again, anything."""
    depth = len(MIDDLES)
    if chance.random() < 0.5:
        return list(range(depth))
    return [chance.randrange(depth) for _ in range(chance.randrange(1, 2 * depth))]
