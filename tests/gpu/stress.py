"""`python -m tests.gpu.stress`: 200 forwards in random orders through tiny slots, with sleeping kernels on both streams.

First the ordering is taken away: if that goes unseen, the delays are too short to show anything. Exit status 1 with faults.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch

from .table import align, say

#: A sleeping kernel's longest time in clock cycles: about 0.3 ms.
CYCLES = 500_000


def pauses(chance: random.Random, cycles: int) -> Any:
    """Puts a sleeping kernel on the current stream, mostly a short one or none."""

    def pause() -> None:
        if chance.random() < 0.6:
            torch.cuda._sleep(int(cycles * chance.random() ** 3) + 1)

    return pause


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.stress", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quants", default="none,int8")
    options = parser.parse_args(argv)
    from .setting import require

    require(options.device)
    import diffusers_offload_fix  # noqa: F401
    from tests import stress

    from .setting import setting

    place = setting(options.device)
    simulated = place.device.type == "npu"
    chance = random.Random(options.seed)
    pause = (lambda: time.sleep(chance.random() * 1e-4)) if simulated else pauses(chance, CYCLES)

    def enable(model: torch.nn.Module, device: torch.device, **arguments: Any) -> None:
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(model, onload_device=device, **arguments)

    with place.around():
        with stress.unordered():
            control = stress.run("none", "block+stream", place.device, enable, pause, 30, options.seed)
        say(f"without ordering {len(control)} of 30 forwards differ")
        rows, bad = [], not control
        for quant in options.quants.split(","):
            for way in stress.WAYS:
                start = time.monotonic()
                faults = stress.run(quant, way, place.device, enable, pause, options.rounds, options.seed)
                rows.append((quant, way, str(options.rounds), f"{time.monotonic() - start:.1f}", faults[0] if faults else "equal"))
                bad = bad or bool(faults)
    say(align(rows, ("weights", "mode", "forwards", "s", "result")))
    if not control:
        say("the delays are too short to show a missing wait")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
