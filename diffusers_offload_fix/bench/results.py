"""The arithmetic and the table: everything here works on plain dictionaries, without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .options import MODES

GIB, MB = 1 << 30, 1e6


def merge(options: dict[str, Any], children: dict[str, Any]) -> dict[str, Any]:
    """One result from those of the variants. A bus rate is the best that any of them saw: the strictest floor."""
    about: dict[str, str] = next((child["about"] for child in children.values() if child.get("about")), {})
    rates = [child["bus"] for child in children.values() if child.get("bus")]
    merged = {
        "options": options,
        "about": about,
        "weights": max((child.get("weights", 0) for child in children.values()), default=0),
        "bus": {name: max(rate[name] for rate in rates) for name in ("pinned_gbs", "memcpy_gbs")} if rates else {},
        "errors": {variant: child["error"] for variant, child in children.items() if child.get("error")},
        "cases": {variant: child["cases"] for variant, child in children.items()},
    }
    merged["rows"] = rows(merged)
    return merged


def floor_ms(resident_ms: float | None, weights: int, bus: dict[str, float], low: bool, disk_gbs: float | None = None) -> float | None:
    """The time that no offloading can beat: compute, or getting every weight over, whichever is longer.

    With `low_cpu_mem_usage` the weights also have to be copied into pinned memory first, from a disk they have to be read (`disk_gbs`).
    """
    if resident_ms is None or not bus:
        return None
    rates = [bus["pinned_gbs"], *([bus["memcpy_gbs"]] if low else []), *([disk_gbs] if disk_gbs else [])]
    return max(resident_ms, *(weights / rate / 1e6 for rate in rates))


def rows(merged: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each mode and batch size, with the floor and the ratios to it."""
    found = []
    cases = merged["cases"]
    for mode in merged["options"]["modes"]:
        for batch in merged["options"]["batches"]:
            resident = cases.get("resident", {}).get(f"resident/b{batch}", {}).get("ms")
            low = bool(MODES[mode].get("low_cpu_mem_usage"))
            files = cases.get("patched", {}).get(f"{mode}/b{batch}", {}).get("sequential_warm_gbs")
            floor = floor_ms(resident, merged["weights"], merged["bus"], low, files)
            row: dict[str, Any] = {"mode": mode, "batch": batch, "resident_ms": resident, "floor_ms": floor}
            for variant in ("unpatched", "patched"):
                case = cases.get(variant, {}).get(f"{mode}/b{batch}")
                ms = (case or {}).get("ms")
                row[variant] = case
                row[f"{variant}_ratio"] = ms / floor if ms is not None and floor else None
            found.append(row)
    return found


def is_good(merged: dict[str, Any]) -> bool:
    """True if the patched and the resident variant ran in full, and every patched output is the resident one."""
    wanted = [name for name in ("resident", "patched") if name in merged["options"]["variants"]]
    cases = [case for name in wanted for case in merged["cases"].get(name, {}).values()]
    complete = bool(cases) and not any(name in merged["errors"] for name in wanted)
    return complete and all(not case.get("error") and case.get("equal") is not False for case in cases)


def report(merged: dict[str, Any]) -> str:
    """The head, the table, and what failed."""
    return "\n\n".join(part for part in (_head(merged), table(merged["rows"]), _drives(merged), _faults(merged)) if part)


def _head(merged: dict[str, Any]) -> str:
    options, bus = merged["options"], merged["bus"]
    about = ", ".join(f"{name} {value}" for name, value in merged["about"].items())
    blocks = "+".join(map(str, options["blocks"]))
    what = f"{options['model']}, {blocks} blocks, {options['tokens']} tokens, weights {options['quant']}"
    lines = [about, f"{what} ({merged['weights'] / GIB:.3g} GiB), compile {options['compile']}"]
    if bus:
        lines.append(f"bus: pinned {bus['pinned_gbs']:.1f} GB/s, memcpy into pinned {bus['memcpy_gbs']:.1f} GB/s")
    for key, case in merged["cases"].get("resident", {}).items():
        if case.get("ms") is not None:
            lines.append(f"{key}: {case['ms']:.1f} ms, device {case['device_peak'] / MB:.0f} MB")
    return "\n".join(lines)


COLUMNS = (
    "mode",
    "batch",
    "floor ms",
    "unpatched ms",
    "patched ms",
    "enable s",
    "pinned MB",
    "host growth MB",
    "host peak",
    "device peak MB",
    "equal",
)


def table(found: list[dict[str, Any]]) -> str:
    """Markdown; where a cell holds two figures, the first is the unpatched one.

    The host's peak is that of enabling, in multiples of the weights, which are there in any case.
    """
    body = [_line(row) for row in found]
    widths = [max(len(line[index]) for line in [COLUMNS, *body]) for index in range(len(COLUMNS))]
    text = [_markdown(COLUMNS, widths), _markdown(["-" * width for width in widths], widths)]
    return "\n".join([*text, *(_markdown(line, widths) for line in body)])


def _markdown(cells: Iterable[str], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"


def _line(row: dict[str, Any]) -> list[str]:
    floor = "?" if row["floor_ms"] is None else f"{row['floor_ms']:.1f}"
    cells = [row["mode"], str(row["batch"]), floor, _time(row, "unpatched"), _time(row, "patched")]
    cells.append(_pair(row, "enable_s", 1.0, ".2f"))
    cells += [_pair(row, name, MB, ".0f") for name in ("pinned_after", "rss_growth")]
    cells += [_pair(row, "host_peak", 1.0, ".2f"), _pair(row, "device_peak", MB, ".0f")]
    cells.append(" / ".join(_equal(row[variant]) for variant in ("unpatched", "patched")))
    return cells


def _time(row: dict[str, Any], variant: str) -> str:
    case = row[variant]
    if case is None:
        return "-"
    if case.get("error"):
        return "not run" if case["error"].startswith("not run") else "fails"
    ratio = row[f"{variant}_ratio"]
    return f"{case['ms']:.1f}" + ("" if ratio is None else f" ({ratio:.2f}x)")


def _pair(row: dict[str, Any], name: str, unit: float, form: str) -> str:
    figures = [(row[variant] or {}).get(name) for variant in ("unpatched", "patched")]
    return " / ".join("-" if figure is None else format(figure / unit, form) for figure in figures)


def _equal(case: dict[str, Any] | None) -> str:
    equal = (case or {}).get("equal")
    return "-" if equal is None else "yes" if equal else "NO"


def _drives(merged: dict[str, Any]) -> str:
    """What the disk modes read, beside what one thread reads from the same files in order."""
    lines = []
    for variant, cases in merged["cases"].items():
        for key, case in cases.items():
            for cache in ("cold", "warm") if case.get("disk_bytes") else ():
                rate, whole = case[f"{cache}_gbs"], case[f"sequential_{cache}_gbs"]
                lines.append(f"{variant} {key}, {cache} cache: {rate:.2f} GB/s of {whole:.2f} in order ({rate / whole:.0%})")
    return "\n".join(lines)


def _faults(merged: dict[str, Any]) -> str:
    lines = [f"{variant}: {error}" for variant, error in merged["errors"].items()]
    for variant, cases in merged["cases"].items():
        lines += [f"{variant} {key}: {case['error']}" for key, case in cases.items() if case.get("error")]
    return "\n".join(lines)
