"""`python -m tests.gpu`: the full matrix on the accelerator of this machine, and a table at the end.

Exit status: 0 when every cell is ok or cannot be built, 1 with faults, 2 without a device, 3 when cells were not run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    add_filters(parser)
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1", "xpu", or "npu" for the simulated one')
    parser.add_argument("--json", type=Path, help="file for the result; it is kept up to date while cells run")
    parser.add_argument("--resume", action="store_true", help="go on from what --json has")
    parser.add_argument("--faults", type=int, default=80, help="how many faults to print in full")
    return parser.parse_args(argv)


def add_filters(parser: argparse.ArgumentParser) -> None:
    """What selects cells, the same for one run and for several."""
    parser.add_argument("--kinds", default="", help="parts of names of kinds, with commas between them")
    parser.add_argument("--skip", default="", help="parts of names of kinds to leave out")
    parser.add_argument("--modes", default="", help="names of modes, with commas between them")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds after which the rest is not run")
    parser.add_argument("--fast", action="store_true", help="two forwards a cell, no other orders of blocks")


def parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def rows(options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """The kinds that were asked for, with the places where they are quantised."""
    from tests.kinds.catalogue import KINDS

    wanted, unwanted = parts(options.kinds), parts(options.skip)
    for name, kind in KINDS.items():
        if wanted and not any(part in name for part in wanted):
            continue
        if any(part in name for part in unwanted):
            continue
        for place in kind.quantised_on:
            yield kind, place


def modes(options: argparse.Namespace) -> list[Any]:
    """The modes that were asked for."""
    from tests.cells import DISK_MODES, MODES, mode_of

    known = [*MODES, *DISK_MODES]
    names = [name for part in parts(options.modes) for name in (DISK_MODES if part == "disk" else (part,))]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown modes {', '.join(unknown)}: use {', '.join(known)}, or disk for all that have it in their names")
    return [mode_of(name) for name in names or MODES]


def main(argv: list[str]) -> int:
    options = parse(argv)
    started = time.monotonic()

    from . import matrix, table
    from . import setting as settings

    matrix.unthreaded()
    settings.require(options.device)
    setting = settings.setting(options.device)
    import diffusers.hooks  # noqa: F401 -- loaded before the freeze below

    import diffusers_offload_fix  # noqa: F401

    if options.fast:
        matrix.fast()
    chosen = modes(options)
    result = matrix.Result()
    if options.resume and options.json is not None and options.json.exists():
        result = matrix.Result.load(options.json)
        matrix.reopen(result, chosen)
    result.about = settings.describe(setting.device)
    gc.collect()
    gc.freeze()
    runner = matrix.Runner(setting, chosen, result, options.json, lambda row: table.say(table.line(row)))
    runner.deadline = started + options.time_limit
    guard = _watch(result, options, [mode.name for mode in chosen])
    runner.run(rows(options))
    guard.cancel()
    table.say("\n" + table.summary(result, [mode.name for mode in chosen], options.faults))
    table.say(f"{time.monotonic() - started:.0f} s")
    return 1 if result.failing() else 0 if result.complete() else 3


def _watch(result: Any, options: argparse.Namespace, names: list[str]) -> threading.Timer:
    """Ends the process if a cell hangs beyond the time limit, with the table of what there is."""
    from . import table

    def hung() -> None:
        result.stopped = f"{result.current} hangs"
        frames = sys._current_frames()
        text = "".join(traceback.format_stack(frames[threading.main_thread().ident or 0])[-12:])
        table.say(f"\n{text}\n{table.summary(result, names, options.faults)}")
        table.end(3)

    timer = threading.Timer(options.time_limit + 30, hung)
    timer.daemon = True
    timer.start()
    return timer


if __name__ == "__main__":
    from .table import end

    try:
        status = main(sys.argv[1:])
    except SystemExit as stop:
        if not isinstance(stop.code, int):
            sys.stderr.write(f"{stop.code}\n")
        status = stop.code if isinstance(stop.code, int) else 2
    except BaseException:
        traceback.print_exc()
        status = 4
    end(status)
