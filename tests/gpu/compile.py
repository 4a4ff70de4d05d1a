"""`python -m tests.gpu.compile`: graph breaks and recompilations of offloaded models, unpatched and patched.

Each variant has a process of its own. In it each case compiles the resident model, and then an offloaded one, and compares
their outputs. Exit status 1 when the patched model breaks or recompiles more than the unpatched one, or differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from .setting import VARIANTS
from .table import align, say, shorten

ROOT = Path(__file__).resolve().parents[2]
MODE = "block+stream"
KINDS = ("plain-bfloat16", "torchao-int8wo")
HOWS = ("model", "blocks")
FORWARDS = 5


def frames() -> tuple[int, int]:
    """Graph breaks, and compiled frames, since the last reset."""
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()), int(counters["frames"]["total"])


def fresh() -> None:
    """Forgets what was compiled and counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(model: Any, how: str, backend: str) -> None:
    """Compiles in place, the whole model or block by block."""
    for part in [model] if how == "model" else list(model.blocks):
        part.compile(backend=backend)


def case(kind: str, how: str, backend: str, device: str) -> dict[str, Any]:
    """What one offloaded model does under one way of compiling."""
    from tests.cells import MODES
    from tests.kinds.catalogue import KINDS as catalogue

    from .setting import setting

    place = setting(device)
    resident, example = catalogue[kind].resident(place.device)
    example = example.to(place.device)
    with torch.no_grad(), place.around():
        fresh()
        compiled(resident, how, backend)
        wanted = [resident(example).clone() for _ in range(2)][-1]
        fresh()
        model, _ = catalogue[kind].build("cpu")
        place.enable(model, place.device, MODES[MODE])
        compiled(model, how, backend)
        differences, settled = [], (0, 0)
        for index in range(FORWARDS):
            got = model(example)
            differences.append(float((got.float() - wanted.float()).abs().max()))
            settled = frames() if index == 1 else settled
    breaks, compiles = frames()
    worst = max(differences, key=lambda number: float("inf") if number != number else number)
    return {"breaks": breaks, "frames": compiles, "recompiled": compiles - settled[1], "difference": worst}


def child(options: argparse.Namespace) -> None:
    """All cases of one variant; the last line is JSON."""
    import diffusers.hooks

    import diffusers_offload_fix  # noqa: F401 -- on or off as the environment says

    found: dict[str, Any] = {}
    for kind in options.kinds.split(","):
        for how in HOWS:
            for backend in options.backends.split(","):
                try:
                    figures = case(kind, how, backend, options.device)
                except Exception as error:
                    traceback.print_exc()
                    figures = {"error": f"{type(error).__name__}: {shorten(str(error), 160)}"}
                found[f"{kind} {how} {backend}"] = figures
    assert diffusers.hooks is not None
    say(json.dumps(found))


def measure(device: str, kinds: str, backends: str, timeout: float = 500) -> dict[str, dict[str, Any]]:
    """The figures of both variants, by case."""
    results = {}
    for variant, switch in VARIANTS.items():
        command = [sys.executable, "-m", "tests.gpu.compile", "--child"]
        command += ["--device", device, "--kinds", kinds, "--backends", backends]
        environment = {**os.environ, "DIFFUSERS_OFFLOAD_FIX": switch}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            raise RuntimeError(f"{variant}: status {done.returncode}: {done.stderr[-2000:]}")
        results[variant] = json.loads(lines[-1])
    return results


def faults(results: dict[str, dict[str, Any]]) -> list[str]:
    """In what the patched model is worse than the unpatched one, or wrong."""
    found = []
    for name, ours in results["patched"].items():
        theirs = results["unpatched"].get(name, {})
        if "error" in ours:
            found.append(f"{name}: {ours['error']}")
            continue
        if ours["difference"] != 0 and not name.endswith("inductor"):
            found.append(f"{name}: the output differs by {ours['difference']:.3g}")
        for figure in ("breaks", "recompiled"):
            if ours[figure] > theirs.get(figure, ours[figure]):
                found.append(f"{name}: {ours[figure]} {figure}, unpatched {theirs[figure]}")
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """One row a case; where there are two figures, the first is the unpatched one."""
    rows = []
    for name in results["patched"]:
        pair = [results[variant].get(name, {}) for variant in ("unpatched", "patched")]
        figures = [" / ".join(str(one.get(figure, "fails")) for one in pair) for figure in ("breaks", "frames", "recompiled")]
        worst = " / ".join("fails" if "error" in one else f"{one['difference']:.3g}" for one in pair)
        rows.append((*name.split(), *figures, worst))
    head = ("kind", "compiled", "backend", "graph breaks", "frames", "after 2nd", "largest difference from resident")
    return align(rows, head)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compile", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--backends", default="inductor")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    from .setting import require

    require(options.device)
    if options.child:
        child(options)
        return 0
    results = measure(options.device, options.kinds, options.backends)
    say(table(results))
    worse = faults(results)
    say("\n".join(["", *worse]) if worse else "\nno more graph breaks or recompilations than unpatched")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
