"""`python -m diffusers_offload_fix bench`: unpatched, patched and resident side by side, against the floor of the hardware."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import options as settings
from . import results
from .parent import Child, Progress

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Runs the benchmark. Returns 0, or 1 when something failed or differs, 2 where it cannot run."""
    arguments = settings.parser().parse_args(argv)
    try:
        options = settings.from_arguments(arguments)
        options.device = settings.find_device(options)
    except settings.Unusable as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.plot is not None and (problem := _no_plot()):
        sys.stderr.write(f"{problem}\n")
        return 2
    options.timeline = arguments.plot is not None
    # What was measured until then is told, as after Ctrl-C.
    with contextlib.suppress(ValueError):  # outside the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    merged = measure(options)
    text = json.dumps(merged, indent=2) if arguments.json else results.report(merged)
    sys.stdout.write(f"{text}\n")
    if arguments.plot is not None:
        from . import plot

        plot.draw(merged, arguments.plot)
        sys.stderr.write(f"wrote {arguments.plot}\n")
    return 0 if results.is_good(merged) else 1


def measure(options: settings.Options) -> dict[str, Any]:
    """Runs each variant in processes of its own, one after another, and merges what they say, until it is interrupted.

    Resident models cannot break each other, so they share a process; offloaded ones have one for each kind of weights.
    """
    deadline = time.time() + options.time_limit
    progress = Progress(sys.stderr, total=options.steps())
    children: list[tuple[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as folder:
        for job in settings.processes(options):
            child = Child(options, job.variant, job.quants, Path(folder), deadline, progress, job.counting)
            children.append((job.variant, child.run()))
            if child.interrupted:
                break
    progress.close()
    return results.merge(options, children)


def _no_plot() -> str | None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib, or install the extra: diffusers-offload-fix[bench]"
    return None
