"""Tables of the matrix, for one run and for several releases side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from .matrix import Result, Row


def say(text: str = "") -> None:
    """A line that is seen at once, also through a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def align(rows: Iterable[Iterable[str]], head: Iterable[str]) -> str:
    """Columns of equal width; the last is left as it is."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * min(len(lines[0]), 120), *lines[1:]])


def verdict(row: Row) -> str:
    """What became of a row, in a few words."""
    if row.reason is not None:
        return f"not constructible: {row.reason}"
    failing, unrun = row.failing(), row.unrun()
    passed = len(row.cells) - len(failing) - len(unrun)
    if failing:
        mode, faults = next(iter(failing.items()))
        return f"FAIL in {len(failing)} of {len(row.cells)} modes, {mode}: {faults[0]}"
    if unrun:
        return f"{passed} ok, {len(unrun)} not run"
    return f"ok ({passed} modes)"


def grid(row: Row) -> str:
    """One character a mode: passed, failed, not run."""
    failing, unrun = row.failing(), row.unrun()
    return "".join("F" if mode in failing else "?" if mode in unrun else "." for mode in row.cells)


def line(row: Row) -> str:
    """What is printed as soon as a row is done."""
    return f"{row.kind:30s} {row.place:12s} {row.seconds:6.1f} s  {grid(row):16s} {shorten(verdict(row), 160)}"


def shorten(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def summary(result: Result, modes: list[str], faults: int) -> str:
    """The table of one run: rows, counts, and the faults in full up to `faults` of them."""
    about = ", ".join(f"{name} {value}" for name, value in result.about.items())
    rows = [(row.kind, row.place, grid(row), shorten(verdict(row), 140)) for row in result.rows]
    parts = [about, f"modes, in this order: {' '.join(modes)}"]
    parts.append(align(rows, ("kind", "quantised on", "modes", "result")))
    parts += list(_in_full(result.failing(), faults))
    parts.append(counts(result))
    if result.stopped is not None:
        parts.append(f"STOPPED: {result.stopped}")
    return "\n\n".join(part for part in parts if part)


def counts(result: Result) -> str:
    """How many cells passed, failed, and did not run."""
    cells = sum(len(row.cells) for row in result.rows)
    failed = sum(len(row.failing()) for row in result.rows)
    unrun = sum(len(row.unrun()) for row in result.rows)
    absent = sum(row.reason is not None for row in result.rows)
    passed = cells - failed - unrun
    return f"{passed} of {cells} cells ok, {failed} failed, {unrun} not run; {absent} rows not constructible"


def _in_full(rows: list[Row], limit: int) -> Iterable[str]:
    every = [(row, mode, fault) for row in rows for mode, faults in row.failing().items() for fault in faults]
    if every[:limit]:
        yield "\n".join(f"{row.name} {mode}: {fault}" for row, mode, fault in every[:limit])
    if len(every) > limit:
        yield f"... and {len(every) - limit} faults more"


def merged(results: dict[str, Result]) -> str:
    """Kinds down, releases across, and below it every text that does not fit into a cell."""
    names = list(dict.fromkeys(row.name for result in results.values() for row in result.rows))
    found = {label: {row.name: row for row in result.rows} for label, result in results.items()}
    notes: dict[str, int] = {}
    rows = []
    for name in names:
        cells = [_cell(found[label].get(name), notes) for label in results]
        rows.append((name, *cells))
    table = align(rows, ("kind", *results))
    return "\n\n".join([table, "\n".join(f"[{number}] {text}" for text, number in notes.items())])


def _cell(row: Row | None, notes: dict[str, int]) -> str:
    if row is None:
        return "absent"
    text = verdict(row)
    if row.reason is None and not row.failing():
        return text
    short, _, _ = text.partition(":")
    return f"{shorten(short, 24)} [{notes.setdefault(text, len(notes) + 1)}]"


def end(status: int) -> None:
    """Ends the process without the libraries' own endings, which may hang or crash after a lost device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
