"""The outcome of `check`, in words and in data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers_offload_fix.check.cases import Case

HEADINGS = ("weights", "mode", "unpatched", "patched", "output equal", "left on the device", "pinned")


@dataclass(frozen=True)
class Row:
    """One case on both sides; an outcome is None if it was not run."""

    case: Case
    unpatched: dict[str, Any] | None
    patched: dict[str, Any] | None

    @property
    def was_run(self) -> bool:
        return self.patched is not None and self.patched["state"] != "skipped"

    @property
    def is_right(self) -> bool:
        """True if the patched side does what it should, or could not be asked."""
        return not self.was_run or verdict(self.patched) == "ok"

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        texts = [verdict(self.unpatched), verdict(self.patched)]
        equal = ("yes" if self.patched["equal"] else "no") if self.was_run and self.patched else "-"
        return (
            self.case.weights,
            self.case.mode,
            *(text if len(text) <= 44 else text[:43] + "…" for text in texts),
            equal,
            self._both("left"),
            self._both("pinned"),
        )

    def _both(self, name: str) -> str:
        before, after = (_size((side or {}).get(name)) for side in (self.unpatched, self.patched))
        return before if before == after else f"{before} -> {after}"

    def as_dict(self) -> dict[str, Any]:
        """The row as data."""
        sides = {"unpatched": self.unpatched, "patched": self.patched}
        kept = ("state", "detail", "equal", "passes", "left", "pinned", "seconds")
        picked = {
            side: None if found is None else {**{name: found.get(name) for name in kept}, "verdict": verdict(found)}
            for side, found in sides.items()
        }
        return {"weights": self.case.weights, "mode": self.case.mode, **picked, "right": self.is_right}


def verdict(found: dict[str, Any] | None) -> str:
    """One outcome in a few words; "ok" if nothing is wrong."""
    if found is None:
        return "not run"
    if found["state"] != "ran":
        return str(found["detail"])
    if not found["equal"]:
        return "wrong output"
    return "weights stay on the device" if found.get("left") else "ok"


def as_text(rows: list[Row]) -> str:
    """All rows under headings, then the errors in full and a closing line."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*text, "", *_wrong(rows), summary(rows)])


def _wrong(rows: list[Row]) -> list[str]:
    return [f"{row.case.weights} {row.case.mode}: {verdict(row.patched)}" for row in rows if not row.is_right]


def summary(rows: list[Row]) -> str:
    """How many cases are right without the plugin and with it."""
    run = [row for row in rows if row.was_run]
    before = sum(verdict(row.unpatched) == "ok" for row in run)
    after = sum(row.is_right for row in run)
    left_out = f", {len(rows) - len(run)} not run" if len(run) < len(rows) else ""
    return f"right: {before} of {len(run)} unpatched, {after} of {len(run)} patched{left_out}"


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 1024:.1f} KiB" if nbytes else "0"
