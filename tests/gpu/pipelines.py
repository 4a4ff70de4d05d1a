"""`python -m tests.gpu.pipelines`: tiny pipelines in every mode, without the plugin and with it, and a table at the end.

Each scenario runs in a process of its own, once with DIFFUSERS_OFFLOAD_FIX=0 and once without, so that a crash or a device that is lost
costs one scenario. Exit status: 0 when every patched scenario is ok, 1 with faults, 2 without a device, 3 when something was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT = 240


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.pipelines", description=__doc__)
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1", "xpu", or "npu" for the simulated one')
    parser.add_argument("--pipelines", default="", help="parts of names of pipelines, with commas between them")
    parser.add_argument("--quant", default="plain,torchao-int8,quanto-qint8", help="kinds of weights, with commas between them")
    parser.add_argument("--modes", default="", help="names of modes, with commas between them")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds after which the rest is not run")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes at a time")
    parser.add_argument("--patched-only", action="store_true", help="leave the unpatched half out")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.one:
        return _one(options)
    from . import setting

    setting.require(options.device)
    return _all(options, time.monotonic() + options.time_limit)


def _one(options: argparse.Namespace) -> int:
    """One pipeline with one kind of weights, in this process: a line of JSON for each mode."""
    pipeline, weights = options.one.split(":")
    import torch

    from . import setting as settings

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    where = settings.setting(options.device)
    if os.environ.get("DIFFUSERS_OFFLOAD_FIX") != "0":
        import diffusers_offload_fix  # noqa: F401
    from tests.pipelines import builders, cells

    place = cells.Place(where.device, lambda: where.live_bytes(), where.around)
    chosen = builders.NAMED[pipeline]
    try:
        with where.around():
            wanted = cells.resident(chosen, weights, place)
    except Exception as error:
        _tell("resident", [_words(error)])
        return 0
    _tell("resident", [])
    for mode in parts(options.modes) or cells.MODES:
        try:
            found = cells.faults(chosen, weights, mode, place, wanted)
        except Exception as error:
            found = [_words(error)]
        _tell(mode, found)
    return 0


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _tell(mode: str, found: list[str]) -> None:
    sys.stdout.write("RESULT " + json.dumps([mode, found]) + "\n")
    sys.stdout.flush()


def _all(options: argparse.Namespace, deadline: float) -> int:
    from tests.pipelines import builders, cells

    names = [p.name for p in builders.ALL if not parts(options.pipelines) or any(part in p.name for part in parts(options.pipelines))]
    modes = parts(options.modes) or list(cells.MODES)
    scenarios = [f"{name}:{weights}" for name in names for weights in parts(options.quant)]
    rows: list[tuple[str, str, str]] = []
    with ThreadPoolExecutor(options.jobs) as pool:

        def start(one: str, switch: str) -> Any:
            return pool.submit(_run, options, one, switch, deadline)

        halves = [(one, None if options.patched_only else start(one, "0"), start(one, "1")) for one in scenarios]
        for one, unpatched, patched in halves:
            before, after = {} if unpatched is None else unpatched.result(), patched.result()
            for mode in modes:
                row = (f"{one.replace(':', ' ')} {mode}", _result(before, mode), _result(after, mode))
                rows.append(row)
                _say(f"{row[0]:48}{row[1][:70]:72}{row[2]}")
    return _table(rows)


def _run(options: argparse.Namespace, one: str, switch: str, deadline: float) -> dict[str, list[str]]:
    """What one process found, by mode; "error" is what ended it before it was through."""
    left = deadline - time.monotonic()
    if left <= 0:
        return {"error": ["not run"]}
    command = [sys.executable, "-m", "tests.gpu.pipelines", "--device", options.device, "--modes", options.modes, "--one", one]
    variables = {**os.environ, "DIFFUSERS_OFFLOAD_FIX": switch}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=min(left + 30, LIMIT))
    except subprocess.TimeoutExpired:
        return {"error": ["hangs"]}
    found = dict(json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT "))
    if done.returncode:
        found["error"] = [f"the process ended with status {done.returncode}: {done.stderr.strip()[-160:]}"]
    return found


def _result(found: dict[str, list[str]], mode: str) -> str:
    if found.get("resident"):
        return f"the resident pipeline fails: {found['resident'][0]}"
    if mode in found:
        return "; ".join(found[mode][:2]) or "ok"
    return "; ".join(found.get("error", ["left out"]))


def _table(rows: list[tuple[str, str, str]]) -> int:
    good = sum(after == "ok" for *_, after in rows)
    _say(f"\nunpatched: {sum(before == 'ok' for _, before, _ in rows)} of {len(rows)} scenarios are ok")
    _say(f"patched:   {good} of {len(rows)} scenarios are ok")
    _say("\n| scenario | unpatched | patched |\n|---|---|---|")
    for row in rows:
        _say("| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in row) + " |")
    if any(after in ("not run", "left out") for *_, after in rows):
        return 3
    return 0 if good == len(rows) else 1


def _say(text: Any) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    from .table import end

    end(main(sys.argv[1:]))
