"""The picture: bars against the floor, and for the plugin's streamed modes when groups were copied and computed with."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .timeline import overlap

COLOURS = {"unpatched": "#b0b0b0", "patched": "#1f77b4", "copy": "#ff7f0e", "compute": "#2ca02c", "floor": "#d62728"}
#: Timelines are drawn for so many cases at most.
TIMELINES = 3


def draw(merged: dict[str, Any], file: Path) -> None:
    """Writes the picture to `file`; the ending of its name says in which format."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    rows = [row for row in merged["rows"] if row["floor_ms"] is not None]
    traced = [row for row in rows if (row["patched"] or {}).get("timeline")][:TIMELINES]
    heights = [max(2.5, 0.5 * len(rows) + 1), *(1.8 for _ in traced)]
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(11, sum(heights) + 0.6), height_ratios=heights, squeeze=False, layout="constrained"
    )
    _bars(axes[0][0], rows, merged)
    for row, line in zip(traced, axes[1:]):
        _timeline(line[0], row)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _bars(axis: Any, rows: list[dict[str, Any]], merged: dict[str, Any]) -> None:
    options = merged["options"]
    for index, row in enumerate(rows):
        for offset, variant in ((-0.2, "unpatched"), (0.2, "patched")):
            _bar(axis, index + offset, row, variant)
        axis.plot([row["floor_ms"]] * 2, [index - 0.42, index + 0.42], color=COLOURS["floor"], lw=2)
    axis.set_yticks(range(len(rows)), [f"{row['quant']}, {row['mode']}, batch {row['batch']}" for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds a forward (median)")
    axis.set_title(f"{options['model']}, weights {', '.join(options['quants'])}, {merged['about'].get('device', '')}")
    for name in ("unpatched", "patched"):
        axis.barh([0], [0], color=COLOURS[name], label=name)
    axis.plot([], [], color=COLOURS["floor"], lw=2, label="floor")
    axis.legend(loc="lower right")
    axis.margins(x=0.12)


def _bar(axis: Any, where: float, row: dict[str, Any], variant: str) -> None:
    case = row[variant]
    if case is None:
        return
    if case.get("ms") is None:
        axis.text(0, where, f" {variant} {'not run' if case['error'].startswith('not run') else 'fails'}", va="center")
        return
    axis.barh([where], [case["ms"]], height=0.38, color=COLOURS[variant])
    axis.text(case["ms"], where, f" {case['ms']:.0f} ms, {row[f'{variant}_ratio']:.2f}x", va="center", fontsize=8)


def _timeline(axis: Any, row: dict[str, Any]) -> None:
    spans = row["patched"]["timeline"]
    for place, kind in ((1, "copy"), (0, "compute")):
        ranges = [(span["start"], span["end"] - span["start"]) for span in spans if span["kind"] == kind]
        if ranges:
            axis.broken_barh(ranges, (place - 0.4, 0.8), facecolors=COLOURS[kind], edgecolors="white", linewidth=0.6)
    axis.set_yticks([0, 1], ["compute", "copy"])
    axis.set_ylim(-0.6, 1.6)
    axis.set_xlim(left=0)
    share = f"{100 * overlap(spans):.0f} % of the copying is under compute"
    axis.set_title(f"one forward, patched, {row['quant']}, {row['mode']}, batch {row['batch']}: {share}", fontsize=9)
    axis.set_xlabel("milliseconds")
