"""What is measured: the command line, and the same as one object that a child process reads."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import targets
from .targets import Case

#: Arguments of `apply_group_offloading` by the name of a mode.
MODES: dict[str, dict[str, Any]] = {
    "block+stream": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    "block+stream+record": {
        "offload_type": "block_level",
        "num_blocks_per_group": 1,
        "use_stream": True,
        "record_stream": True,
    },
    "leaf+stream": {"offload_type": "leaf_level", "use_stream": True},
    "leaf+stream+record": {"offload_type": "leaf_level", "use_stream": True, "record_stream": True},
    "block+stream+low": {
        "offload_type": "block_level",
        "num_blocks_per_group": 1,
        "use_stream": True,
        "low_cpu_mem_usage": True,
    },
    "leaf+stream+low": {"offload_type": "leaf_level", "use_stream": True, "low_cpu_mem_usage": True},
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "leaf": {"offload_type": "leaf_level"},
}
#: The same with the weights in files; the folder is added when a case runs.
DISK_MODES: dict[str, dict[str, Any]] = {f"{name}+disk": MODES[name] for name in ("block+stream", "leaf+stream", "block")}
DEFAULT_MODES = (*MODES, "block+stream+disk")
MODES |= DISK_MODES
#: Number of blocks of each model; about 7 GiB in bfloat16.
BLOCKS = {"flux": (6, 12), "wan": (10,)}
HEADS = {"flux": 24, "wan": 40}
QUANTS = ("none", "int8", "float8", "quanto-int8")
VARIANTS = ("resident", "unpatched", "patched")
COMPILES = ("none", "model", "blocks")
#: Where `torch.accelerator` is missing (before torch 2.6), these are tried.
KNOWN_DEVICES = ("cuda", "xpu", "npu", "mps")


class Unusable(ValueError):
    """The options make no sense, or this machine cannot run them. The message is for the user."""


@dataclass
class Options:
    """Everything that a child process needs to know, apart from its variant."""

    model: str = "flux"
    quants: tuple[str, ...] = ("none",)
    blocks: tuple[int, ...] = (6, 12)
    heads: int = 24
    tokens: int = 4096
    text: int = 512
    batches: tuple[int, ...] = (1,)
    modes: tuple[str, ...] = DEFAULT_MODES
    variants: tuple[str, ...] = VARIANTS
    compile: str = "none"
    warmups: int = 3
    forwards: int = 7
    bus_mib: int = 1024
    time_limit: float = 560.0
    plugin: str | None = None
    device: str = "auto"
    timeline: bool = False
    targets: bool = False
    counts: bool = False
    folder: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def dumps(self) -> str:
        return json.dumps(self.as_dict())

    @classmethod
    def loads(cls, text: str) -> Options:
        """Reads what `dumps` wrote."""
        raw: dict[str, Any] = json.loads(text)
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
        return cls(**fields)

    def cases(self, variant: str) -> list[Case]:
        """What a variant runs, the most telling first: with `--targets` only what the targets need."""
        if self.targets:
            return targets.cases(self.quants, variant, self.compile)
        modes = ("resident",) if variant == "resident" else self.modes
        return [(quant, mode, batch) for quant in self.quants for mode in modes for batch in self.batches]

    def pairs(self) -> list[Case]:
        """The cases of both offloading variants, each once, in order."""
        both = [case for variant in ("patched", "unpatched") for case in self.cases(variant)]
        return sorted(dict.fromkeys(both), key=lambda case: self.quants.index(case[0]))

    def counted(self, variant: str) -> list[Case]:
        """The cases whose copies, waits and allocations are counted, each with the first of its batch sizes."""
        if not self.counts:
            return []
        modes = ("resident", targets.STREAMED, targets.LEAF)
        cases = [case for case in self.cases(variant) if case[1] in modes or not self.targets]
        return list({case[:2]: case for case in reversed(cases)}.values())[::-1]

    def steps(self) -> int:
        """How many cases the progress bar counts."""
        return sum(len(self.cases(variant)) + len(self.counted(variant)) for variant in self.variants)


class Job(NamedTuple):
    """What one process does: a variant with some kinds of weights, timed or counted."""

    variant: str
    quants: tuple[str, ...]
    counting: bool = False


def processes(options: Options) -> list[Job]:
    """What each process does, in the order in which they run."""
    jobs = [Job("resident", options.quants)] if "resident" in options.variants else []
    # The patched variant first: where the time is over too early, it is the one that is asked for.
    offloading = [variant for variant in ("patched", "unpatched") if variant in options.variants]
    jobs += [Job(variant, (quant,)) for quant in options.quants for variant in offloading]
    if not options.counts:
        return jobs
    # A profiler slows down what comes after it in its process, so that nothing may be timed there. What the targets ask for comes
    # first: the patched variant, and the resident model, whose allocations are not the weights'.
    variants = [variant for variant in ("resident", "patched", "unpatched") if variant in options.variants]
    counted = [Job(variant, (quant,), counting=True) for quant in options.quants for variant in variants]
    return jobs + sorted(counted, key=lambda job: job.variant == "unpatched")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m diffusers_offload_fix bench",
        description="Times group offloading, unpatched and patched, against the floor that bus and compute set.",
    )
    made.add_argument("--model", choices=sorted(BLOCKS), default="flux", help="random weights of real widths")
    made.add_argument("--quant", help=f"weights, from {', '.join(QUANTS)}; one kind, or several with commas between them")
    made.add_argument("--batch", default="1", help="batch size, or several with commas between them")
    made.add_argument("--modes", default=",".join(DEFAULT_MODES), help=f"from {', '.join(MODES)}")
    made.add_argument("--variants", default=",".join(VARIANTS), help=f"from {', '.join(VARIANTS)}")
    made.add_argument("--blocks", help='number of blocks, as "6,12" for flux or "10" for wan')
    made.add_argument("--heads", type=int, help="attention heads of 128, which set the width")
    made.add_argument("--tokens", type=int, default=4096, help="image or video tokens")
    made.add_argument("--compile", choices=COMPILES, default="none", help="torch.compile, in every variant")
    made.add_argument("--targets", action="store_true", help="run what the project's targets are about, and say which are met")
    made.add_argument("--counts", action="store_true", help="count copies, waits and allocations of a forward, in further processes")
    made.add_argument("--warmups", type=int, default=3)
    made.add_argument("--forwards", type=int, default=7, help="timed forwards; their median counts")
    made.add_argument("--bus-mib", type=int, default=1024, help="size of the copies that measure the bus")
    made.add_argument("--time-limit", type=float, default=560, help="seconds; what is left then is not run")
    made.add_argument("--device", default="auto", help="the accelerator, if not the one that torch names")
    made.add_argument("--folder", help="where the disk modes put their files (the folder for temporary files)")
    made.add_argument("--plugin", metavar="MODULE", help="a module to import first, for devices outside torch")
    made.add_argument("--json", action="store_true", help="print JSON instead of the table")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="draw bars and a timeline; needs matplotlib")
    return made


def from_arguments(arguments: argparse.Namespace) -> Options:
    """Checks the command line.

    Raises:
        Unusable: a name or a number is not valid.
    """
    blocks = _numbers("--blocks", arguments.blocks) if arguments.blocks else BLOCKS[arguments.model]
    if len(blocks) != len(BLOCKS[arguments.model]):
        raise Unusable(f"--blocks for {arguments.model} takes {len(BLOCKS[arguments.model])} numbers")
    return Options(
        model=arguments.model,
        quants=_names("--quant", arguments.quant or (",".join(QUANTS) if arguments.targets else "none"), QUANTS),
        blocks=blocks,
        heads=arguments.heads or HEADS[arguments.model],
        tokens=arguments.tokens,
        batches=_numbers("--batch", arguments.batch),
        modes=_names("--modes", arguments.modes, MODES),
        variants=tuple(sorted(_names("--variants", arguments.variants, VARIANTS), key=VARIANTS.index)),
        compile=arguments.compile,
        warmups=arguments.warmups,
        forwards=max(1, arguments.forwards),
        bus_mib=arguments.bus_mib,
        time_limit=arguments.time_limit,
        plugin=arguments.plugin,
        device=arguments.device,
        targets=arguments.targets,
        # Some targets are about counts; a compiled model has none.
        counts=arguments.counts or (arguments.targets and arguments.compile == "none"),
        folder=arguments.folder,
    )


def _names(option: str, text: str, valid: Any) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in valid]
    if unknown or not names:
        raise Unusable(f"{option}={text!r} is not valid: use names from {', '.join(valid)}, with commas between them")
    return names


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise Unusable(f"{option}={text!r} is not valid: use numbers with commas between them") from None


def find_device(options: Options) -> str:
    """The accelerator's name.

    Raises:
        Unusable: torch, diffusers or an accelerator is missing.
    """
    try:
        import torch

        if options.plugin:
            importlib.import_module(options.plugin)
        importlib.import_module("diffusers")
    except ImportError as error:
        raise Unusable(f"the benchmark cannot run: {error}") from error
    if options.device != "auto":
        return options.device
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        current = accelerator.current_accelerator() if accelerator.is_available() else None
        if current is not None:
            return str(current.type)
    else:
        for name in KNOWN_DEVICES:
            module = getattr(torch, name, None)
            if module is not None and module.is_available():
                return name
    raise Unusable("this machine has no accelerator that torch can use, so there is nothing to offload from")
