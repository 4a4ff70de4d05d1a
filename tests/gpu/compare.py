"""`python -m tests.gpu.compare`: this plugin beside unpatched diffusers and other libraries, on one model, in one run.

Each contender has a process and a time limit of its own; one that fails is a row with its error. Where another library keeps part of
the model on the device by its own choice, it runs a second time with what fits under this plugin's device peak ("@peak"), so that
times are compared at equal memory. Exit status: 0 when everything ran and this plugin is ahead, 1 when not, 2 without a device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusers_offload_fix.bench import options as settings
from diffusers_offload_fix.bench import results
from diffusers_offload_fix.bench.parent import Child, Progress

from .table import align, say

ROOT = Path(__file__).resolve().parents[2]
#: Ours at block level, whose device peak is the measure for "@peak".
OURS = "block+stream"
HEAD = (
    "",
    "weights",
    "ms",
    "of the floor",
    "device peak MB",
    "between MB",
    "pinned MB",
    "host growth MB",
    "enable s",
    "equal",
)


@dataclass
class Entry:
    """One row: whose it is, which way of offloading, with which weights."""

    label: str
    variant: str
    mode: str
    quant: str

    @property
    def key(self) -> str:
        return results.name(self.quant, self.mode, 1)


def entries(quant: str) -> list[Entry]:
    """What runs for plain or int8 weights, each kind of weights beginning with the resident model."""
    found = []
    for weights in ["none"] if quant == "none" else ["int8", "quanto-int8"]:
        found.append(Entry("resident", "resident", "resident", weights))
        found.append(Entry("this plugin, block+stream", "patched", OURS, weights))
        found.append(Entry("this plugin, leaf+stream", "patched", "leaf+stream", weights))
        if weights != "quanto-int8":
            found.append(Entry("diffusers, block+stream+record", "unpatched", "block+stream+record", weights))
            found.append(Entry("dynamic-offloader", "other", "ddo", weights))
            found.append(Entry("dynamic-offloader @peak", "other", "ddo@peak", weights))
        if weights != "int8":
            found.append(Entry("mmgp", "other", "mmgp", weights))
            found.append(Entry("mmgp @peak", "other", "mmgp@peak", weights))
    return found


class Process(Child):
    """One entry in a process of its own.

    Args:
        resident: bytes that the library may keep on the device; None for its own choice.
        site: a folder with the other libraries, or None where they are installed.
    """

    def __init__(self, entry: Entry, resident: float | None, site: Path | None, *rest: Any) -> None:
        super().__init__(rest[0], entry.variant, (entry.quant,), *rest[1:])
        self.resident, self.site = resident, site

    def _command(self) -> list[str]:
        arguments = [self.options.dumps(), self.variant, self.quants[0], str(self.folder), str(self.deadline)]
        return [sys.executable, "-m", "tests.gpu.contenders", *arguments, "own" if self.resident is None else str(self.resident)]

    def _environment(self) -> dict[str, str]:
        environment = super()._environment()
        paths = [str(ROOT), *([str(self.site)] if self.site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def run(options: settings.Options, wanted: list[Entry], site: Path | None, limit: float) -> list[dict[str, Any]]:
    """A dictionary for each entry that was run: its figures, or its error."""
    found: list[dict[str, Any]] = []
    progress = Progress(sys.stderr, len(wanted))
    with tempfile.TemporaryDirectory(prefix="offload-compare-") as folder:
        for entry in wanted:
            only = replace(options, modes=(entry.mode,), quants=(entry.quant,))
            resident = allowance(entry, found)
            process = Process(entry, resident, site, only, Path(folder), time.time() + limit, progress)
            result = process.run()
            case = result["cases"].get(entry.key, {})
            error = case.get("error") or (None if case else result.get("error", "nothing was measured"))
            row = {"label": entry.label, "mode": entry.mode, "quant": entry.quant, "variant": entry.variant, **case, "error": error}
            row |= {"weights": result.get("weights", {}).get(entry.quant), "bus": result.get("bus"), "about": result.get("about")}
            found.append({**row, "allowed": resident, "kept": result.get("kept")})
            if process.interrupted:
                break
    progress.close()
    floors(found)
    return found


def allowance(entry: Entry, found: list[dict[str, Any]]) -> float | None:
    """Bytes of blocks that an "@peak" entry may keep on the device, so that its peak is this plugin's; None for a library's choice."""
    if not entry.mode.endswith("@peak"):
        return None
    same = {row["mode"]: row for row in found if row["quant"] == entry.quant}
    ours, own = same.get(OURS, {}), same.get(entry.mode.removesuffix("@peak"), {})
    if ours.get("device_peak") is None or own.get("device_peak") is None:
        return 0.0
    return max(0.0, (own["kept"] or 0) + ours["device_peak"] - own["device_peak"])


def floors(found: list[dict[str, Any]]) -> None:
    """Puts the floor and the ratio to it into each row."""
    rates = [row["bus"]["pinned_gbs"] for row in found if row.get("bus")]
    for row in found:
        resident = next((r.get("ms") for r in found if r["quant"] == row["quant"] and r["mode"] == "resident"), None)
        sizes = [r["weights"] for r in found if r["quant"] == row["quant"] and r.get("weights")]
        bus = {"pinned_gbs": max(rates)} if rates else {}
        row["floor_ms"] = results.floor_ms(resident, sizes[0], bus, False) if sizes else None
        row["ratio"] = row["ms"] / row["floor_ms"] if row.get("ms") and row["floor_ms"] else None


def line(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["label"], row["quant"], "fails", *["-"] * (len(HEAD) - 4), row["error"][:90]]
    ratio = "-" if row["ratio"] is None or row["mode"] == "resident" else f"{row['ratio']:.2f}x"
    memory = [f"{row[name] / results.MB:.0f}" for name in ("device_peak", "between", "pinned_after", "rss_growth")]
    equal = {True: "yes", False: "NO", None: "-"}[row["equal"]]
    return [row["label"], row["quant"], f"{row['ms']:.1f}", ratio, *memory, f"{row['enable_s']:.2f}", equal]


def behind(found: list[dict[str, Any]]) -> list[str]:
    """Where another library is faster than this plugin at no more device memory, or this plugin did not run or differs."""
    faults = []
    for quants in ({"none"}, {"int8", "quanto-int8"}):
        rows = [row for row in found if row["quant"] in quants]
        ours = [row for row in rows if row["variant"] == "patched"]
        faults += [
            f"{row['label']}, {row['quant']}: {row['error'] or 'another output'}" for row in ours if row["error"] or not row["equal"]
        ]
        good = [row for row in ours if not row["error"]]
        for other in (row for row in rows if row["variant"] in ("other", "unpatched") and not row["error"]):
            faults += [
                f"{other['label']} ({other['quant']}) takes {other['ms']:.1f} ms, {our['label']} ({our['quant']}) {our['ms']:.1f}"
                for our in good[:1]
                if other["ms"] < our["ms"] and other["device_peak"] <= 1.02 * our["device_peak"]
            ]
    return faults


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compare", description=__doc__)
    parser.add_argument("--quant", choices=("none", "int8"), default="none")
    parser.add_argument("--time-limit", type=float, default=75, help="seconds for each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="where the other libraries are, if they are not installed")
    parser.add_argument("--only", default="", help="parts of labels, with commas between them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plugin", help="a module to import first, for devices outside torch")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this out")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    from .setting import require

    if not arguments.plugin:
        require(arguments.device)
    options = settings.Options(device=arguments.device, plugin=arguments.plugin, forwards=5)
    if arguments.small:
        options = replace(options, blocks=(5, 5), heads=1, tokens=16, bus_mib=4, warmups=1, forwards=2)
    wanted = [e for e in entries(arguments.quant) if not arguments.only or any(part in e.label for part in arguments.only.split(","))]
    found = run(options, wanted, arguments.site, arguments.time_limit)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))
    about = next((row["about"] for row in found if row.get("about")), {})
    say(", ".join(f"{name} {value}" for name, value in about.items()))
    for row in found:
        if row["mode"] == "resident" and row["floor_ms"]:
            say(f"{row['quant']}: {row['weights'] / results.GIB:.2f} GiB, floor {row['floor_ms']:.1f} ms")
    say(align([tuple(line(row)) for row in found], HEAD))
    faults = behind(found)
    say("\n".join(["", *faults]) if faults else "\nthis plugin is ahead at no more device memory")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
