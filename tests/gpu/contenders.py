"""Other libraries that stream weights, each configured for its best speed on one model; `tests.gpu.compare` runs them.

Started as `python -m tests.gpu.contenders OPTIONS VARIANT QUANT FOLDER DEADLINE RESIDENT`, where RESIDENT is how many bytes of blocks
the library may keep on the device, or "own" for its own choice. How they are configured, and why:

- diffusers-dynamic-offloader 0.1.0rc2: preset `one_shot_fast`, which is what "auto" stands for. It pins the weights of linears and
  embeddings, copies each one on the computing stream when its module runs, and keeps a quarter of the blocks of the longest stack on
  the device (`balanced`). Its native VMM routes need an allocator package and weights that it loads from a checkpoint by itself, so
  they are not run. For torchao weights it has no route of its own but diffusers' group offloading, so what its linear route makes of
  them is shown as it is.
- mmgp 3.8.2: profile 2 (`HighRAM_LowVRAM`): pinned memory, asynchronous transfers, a budget for the transformer. Every profile
  quantises the transformer on the CPU by default, which takes long; that is switched off, and int8 is a model that quanto has
  quantised before, as its README advises. `budgets` must be a dictionary: a bare number is read as 0, which means that the whole model
  goes to the device. It sets torch's default device to "cuda", which is put back. It streams quanto tensors, not torchao's.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffusers_offload_fix.bench import work
from diffusers_offload_fix.bench.options import MODES, Options

GIB, MIB = 1 << 30, 1 << 20
#: The machine reports less memory than it has until it is used: neither library may choose a slower way for that.
HOST_GIB, PINNABLE = 100.0, 0.95


def ddo(model: Any, device: torch.device, resident: float | None) -> float:
    """diffusers-dynamic-offloader with `resident` bytes of blocks on the device, or its own choice; returns how many there are."""
    library = importlib.import_module("diffusers_dynamic_offloader")
    budget = {} if resident is None else {"resident_module_budget_gb": max(resident, 1) / GIB}
    result = library.enable_offload(
        model,
        preset="one_shot_fast",
        component="transformer",
        execution_device=device,
        use_environment=False,
        available_system_ram_gb=HOST_GIB,
        **budget,
    )
    return float(result.hook.state.planner_decisions.get("selected_resident_module_gb", 0)) * GIB


def mmgp(model: Any, device: torch.device, resident: float | None) -> float:
    """mmgp with `resident` bytes of blocks on the device, or its profile's choice; returns how many there are."""
    library = importlib.import_module("mmgp")
    offload = importlib.import_module("mmgp.offload")
    budget = {} if resident is None else {"budgets": {"transformer": mmgp_budget(model, resident) / MIB}}
    try:
        made = offload.profile(
            {"transformer": model},
            library.profile_type.HighRAM_LowVRAM,
            verboseLevel=0,
            quantizeTransformer=False,
            perc_reserved_mem_max=PINNABLE,
            **budget,
        )
    finally:
        torch.set_default_device(None)
    return float(sum(made.preloaded_blocks_per_model["transformer"].values()))


def mmgp_budget(model: Any, resident: float) -> float:
    """The budget under which mmgp keeps `resident` bytes of blocks: it takes the rest of the model and two blocks a stack off first."""
    stacks = [part for part in model.children() if isinstance(part, torch.nn.ModuleList)]
    blocks = sum(_bytes(stack) for stack in stacks)
    return _bytes(model) - blocks + 2 * sum(max(map(_bytes, stack)) for stack in stacks) + resident


def _bytes(module: torch.nn.Module) -> int:
    from diffusers_offload_fix.bench.build import weight_bytes

    return weight_bytes(module)


MODULES = {"ddo": ("diffusers_dynamic_offloader",), "mmgp": ("mmgp", "mmgp.offload")}
CONTENDERS: dict[str, Callable[[Any, torch.device, float | None], float]] = {"ddo": ddo, "mmgp": mmgp}


class Contender(work.Worker):
    """The bench's measuring, around another way of offloading."""

    def __init__(self, options: Options, name: str, quant: str, folder: Path, deadline: float, resident: float | None) -> None:
        super().__init__(options, name, (quant,), folder, deadline)
        for module in MODULES.get(options.modes[0].split("@")[0], ()):
            # Now, so that neither its time nor its memory counts as enabling.
            importlib.import_module(module)
        self.resident = resident
        self.kept = 0.0

    def _offload(self, model: Any, mode: str, folder: Path | None) -> None:
        if mode in MODES or mode == "resident":
            super()._offload(model, mode, folder)
            return
        self.kept = CONTENDERS[mode.split("@")[0]](model, self.device, self.resident)


def main(argv: list[str]) -> int:
    options = Options.loads(argv[0])
    name, quant, folder, deadline, resident = argv[1], argv[2], Path(argv[3]), float(argv[4]), argv[5]
    if options.plugin:
        importlib.import_module(options.plugin)
    contender = Contender(options, name, quant, folder, deadline, None if resident == "own" else float(resident))
    found = contender.run()
    found["kept"] = contender.kept
    work.say("", json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
