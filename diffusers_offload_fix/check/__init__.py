"""`python -m diffusers_offload_fix check`: a tiny Flux pipeline, run on this machine without the plugin and with it.

Every case (a kind of weights in a memory mode) is compared bit for bit with the same pipeline fully on the device. The
two sides run in processes of their own. One that crashes, or is silent for longer than the time limit, fails the case
that it was at, and another one goes on with the rest.

For tests, DIFFUSERS_OFFLOAD_FIX_CHECK_PRELUDE=module:function names a function that each of these processes calls
before it imports torch or diffusers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import Any

from diffusers_offload_fix.check import table
from diffusers_offload_fix.check.cases import MODES, WEIGHTS, Case, chosen, grid, streamed
from diffusers_offload_fix.check.progress import Progress
from diffusers_offload_fix.check.supervisor import Side

NEEDED = ("torch", "diffusers", "accelerate", "transformers")
NO_ACCELERATOR = "No accelerator was found. The modes that need no stream run on the CPU, where nothing has to move."


def main(argv: list[str]) -> int:
    """Runs the check. Returns 0 if every patched case is right, 1 if not, 2 for wrong arguments."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"check needs {', '.join(missing)}: pip install 'diffusers-offload-fix[diffusers]' torch\n")
        return 1
    wanted = grid(options.weights, options.modes)
    sides = [Side(patched, options.device, options.timeout, options.folder) for patched in (False, True)]
    _run(sides, wanted, options.fail_fast)
    rows = [table.Row(case, *(side.results.get(case) for side in sides)) for case in wanted]
    return _conclude(sides, rows, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diffusers_offload_fix check",
        description="Run a tiny Flux pipeline unpatched and patched, and compare it with the resident one bit for bit.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", help="where to run, for example cuda:1 (default: the accelerator, or cpu)")
    parser.add_argument("--weights", type=_names(WEIGHTS), default=list(WEIGHTS), metavar="NAME,NAME", help=", ".join(WEIGHTS))
    parser.add_argument("--modes", type=_names(MODES), default=list(MODES), metavar="NAME,NAME", help=", ".join(MODES))
    parser.add_argument("--folder", help="where the disk modes put their files (default: the folder for temporary files)")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="time limit of a case (300)")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first case that is wrong with the plugin")
    return parser


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        try:
            return chosen(text, known)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _run(sides: list[Side], wanted: list[Case], fail_fast: bool) -> None:
    progress = Progress(len(sides) * len(wanted))
    try:
        for side in sides:
            name = "patched" if side.patched else "unpatched"

            def on_result(case: Case, found: dict[str, Any], name: str = name, strict: bool = side.patched) -> bool:
                progress.step(f"{name}, {case.weights}, {case.mode}")
                return not (fail_fast and strict and found["state"] != "skipped" and table.verdict(found) != "ok")

            side.run(wanted, on_result)
    finally:
        progress.close()


def _conclude(sides: list[Side], rows: list[table.Row], as_json: bool) -> int:
    hello = next((side.hello for side in reversed(sides) if side.hello), None)
    if hello is None:
        outcome = rows[0].unpatched or {}
        sys.stderr.write(f"The check cannot be run here: {outcome.get('detail')}\n")
        return 1
    notes = [NO_ACCELERATOR] if hello["accelerator"] is None else []
    notes += [f"not applied: {text}" for text in sides[-1].hello.get("not_applied", ())]
    right = all(row.is_right for row in rows) and any(row.was_run for row in rows)
    if as_json:
        found = {"device": hello["device"], "accelerator": hello["accelerator"], "notes": notes, "right": right}
        text = json.dumps({**found, "rows": [row.as_dict() for row in rows]}, indent=2)
    else:
        shown = [row for row in rows if hello["streams"] or not streamed(row.case.mode)]
        text = "\n".join([f"device: {hello['accelerator'] or hello['device']}", *notes, "", table.as_text(shown)])
    sys.stdout.write(text + "\n")
    return 0 if right else 1
