"""The arithmetic and the table: everything here works on plain dictionaries, without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import targets
from .options import MODES, Options

GIB, MB = 1 << 30, 1e6
COUNTS = ("copies", "waits", "allocations")


def name(quant: str, mode: str, batch: int) -> str:
    """The key of a case."""
    return f"{quant}/{mode}/b{batch}"


def merge(options: Options, children: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """One result from those of the processes. A bus rate is the best that any of them saw: the strictest floor."""
    about: dict[str, str] = next((child["about"] for _, child in children if child.get("about")), {})
    rates = [child["bus"] for _, child in children if child.get("bus")]
    merged: dict[str, Any] = {
        "options": options.as_dict(),
        "about": about,
        "weights": {quant: size for _, child in children for quant, size in child.get("weights", {}).items()},
        "bus": {rate: max(each[rate] for each in rates) for rate in ("pinned_gbs", "memcpy_gbs")} if rates else {},
        "errors": {},
        "cases": {variant: {} for variant in options.variants},
    }
    for variant, child in children:
        merged["cases"][variant].update(child["cases"])
        for key, found in child.get("counts", {}).items():
            merged["cases"][variant].get(key, {}).update(found)
        if child.get("error"):
            merged["errors"].setdefault(variant, []).append(child["error"])
    _subtract_resident(merged["cases"])
    merged["rows"] = rows(merged, options.pairs())
    if options.targets:
        merged["targets"] = targets.verdicts(merged["rows"], merged["weights"], options.compile)
    return merged


def _subtract_resident(cases: dict[str, Any]) -> None:
    """Leaves of each count what offloading adds: the kernels of a forward allocate, and may wait, by themselves."""
    for variant in ("unpatched", "patched"):
        for key, case in cases.get(variant, {}).items():
            quant, _, batch = key.split("/")
            own = cases.get("resident", {}).get(f"{quant}/resident/{batch}", {})
            for figure in COUNTS:
                if case.get(figure) is not None and own.get(figure) is not None:
                    case[figure] = max(0, case[figure] - own[figure])


def floor_ms(resident_ms: float | None, weights: int, bus: dict[str, float], low: bool, disk_gbs: float | None = None) -> float | None:
    """The time that no offloading can beat: compute, or getting every weight over, whichever is longer.

    With `low_cpu_mem_usage` the weights also have to be copied into pinned memory first, from a disk they have to be read (`disk_gbs`).
    """
    if resident_ms is None or not bus:
        return None
    rates = [bus["pinned_gbs"], *([bus["memcpy_gbs"]] if low else []), *([disk_gbs] if disk_gbs else [])]
    return max(resident_ms, *(weights / rate / 1e6 for rate in rates))


def rows(merged: dict[str, Any], pairs: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """A row for each case, with the floor and the ratios to it."""
    found = []
    cases = merged["cases"]
    for quant, mode, batch in pairs:
        resident = cases.get("resident", {}).get(name(quant, "resident", batch), {}).get("ms")
        low = bool(MODES[mode].get("low_cpu_mem_usage"))
        files = cases.get("patched", {}).get(name(quant, mode, batch), {}).get("sequential_warm_gbs")
        floor = floor_ms(resident, merged["weights"].get(quant, 0), merged["bus"], low, files)
        row: dict[str, Any] = {"quant": quant, "mode": mode, "batch": batch, "resident_ms": resident, "floor_ms": floor}
        row["weights"] = merged["weights"].get(quant)
        for variant in ("unpatched", "patched"):
            case = cases.get(variant, {}).get(name(quant, mode, batch))
            ms = (case or {}).get("ms")
            row[variant] = case
            row[f"{variant}_ratio"] = ms / floor if ms is not None and floor else None
        found.append(row)
    return found


def is_good(merged: dict[str, Any]) -> bool:
    """True if the patched and the resident variant ran in full, and every patched output is the resident one."""
    wanted = [variant for variant in ("resident", "patched") if variant in merged["options"]["variants"]]
    cases = [case for variant in wanted for case in merged["cases"].get(variant, {}).values()]
    complete = bool(cases) and not any(variant in merged["errors"] for variant in wanted)
    return complete and all(not case.get("error") and case.get("equal") is not False for case in cases)


def report(merged: dict[str, Any]) -> str:
    """The head, the tables, and what failed."""
    parts = [_head(merged), table(merged["rows"]), counts_table(merged["rows"]), _drives(merged)]
    if merged.get("targets"):
        parts.append(markdown(*targets.table(merged["targets"])))
    return "\n\n".join(part for part in (*parts, _faults(merged)) if part)


def _head(merged: dict[str, Any]) -> str:
    options, bus = merged["options"], merged["bus"]
    about = ", ".join(f"{what} {value}" for what, value in merged["about"].items())
    blocks = "+".join(map(str, options["blocks"]))
    sizes = ", ".join(f"{quant} {size / GIB:.3g} GiB" for quant, size in merged["weights"].items())
    what = f"{options['model']}, {blocks} blocks, {options['tokens']} tokens"
    lines = [about, f"{what}, weights {sizes}, compile {options['compile']}"]
    if bus:
        lines.append(f"bus: pinned {bus['pinned_gbs']:.1f} GB/s, memcpy into pinned {bus['memcpy_gbs']:.1f} GB/s")
    for key, case in merged["cases"].get("resident", {}).items():
        if case.get("ms") is not None:
            lines.append(f"{key}: {case['ms']:.1f} ms, device {case['device_peak'] / MB:.0f} MB")
    return "\n".join(lines)


COLUMNS = (
    "weights",
    "mode",
    "batch",
    "floor ms",
    "unpatched ms",
    "patched ms",
    "enable s",
    "pinned x",
    "host peak x",
    "device peak MB",
    "equal",
)
COUNT_COLUMNS = ("weights", "mode", "batch", "groups", "copies", "host waits", "device allocations")


def table(found: list[dict[str, Any]]) -> str:
    """Markdown; where a cell holds two figures, the first is the unpatched one.

    Pinned memory and the host's peak while enabling are multiples of the weights; these are there in any case, and in the peak.
    """
    return markdown(COLUMNS, [_line(row) for row in found])


def counts_table(found: list[dict[str, Any]]) -> str:
    """What offloading adds to one forward; empty if nothing was counted."""
    if not any(
        (row[variant] or {}).get(figure) is not None for row in found for variant in ("unpatched", "patched") for figure in COUNTS
    ):
        return ""
    return markdown(COUNT_COLUMNS, [[*_case(row), *(_pair(row, figure, 1, ".0f") for figure in ("groups", *COUNTS))] for row in found])


def markdown(columns: Iterable[str], body: list[list[str]]) -> str:
    """A table with cells of equal width."""
    head = list(columns)
    widths = [max(len(line[index]) for line in [head, *body]) for index in range(len(head))]
    return "\n".join(_markdown(line, widths) for line in [head, ["-" * width for width in widths], *body])


def _markdown(cells: Iterable[str], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"


def _case(row: dict[str, Any]) -> list[str]:
    return [row["quant"], row["mode"], str(row["batch"])]


def _line(row: dict[str, Any]) -> list[str]:
    floor = "?" if row["floor_ms"] is None else f"{row['floor_ms']:.1f}"
    cells = [*_case(row), floor, _time(row, "unpatched"), _time(row, "patched")]
    cells += [_pair(row, "enable_s", 1.0, ".2f"), _pair(row, "pinned_after", row["weights"] or 1, ".2f")]
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


def _pair(row: dict[str, Any], figure_name: str, unit: float, form: str) -> str:
    figures = [(row[variant] or {}).get(figure_name) for variant in ("unpatched", "patched")]
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
    lines = [f"{variant}: {error}" for variant, errors in merged["errors"].items() for error in errors]
    alike: dict[tuple[str, str], list[str]] = {}
    for variant, cases in merged["cases"].items():
        for key, case in cases.items():
            if case.get("error"):
                alike.setdefault((variant, case["error"]), []).append(key)
    return "\n".join([*lines, *(f"{variant} {', '.join(keys)}: {error}" for (variant, error), keys in alike.items())])
