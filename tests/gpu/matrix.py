"""Runs kinds in modes on one device and keeps what came of it, so that a crash or a time limit loses nothing."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests import cells
from tests.cells import Mode, Setting
from tests.kinds.catalogue import Kind

from .setting import broken

NOT_RUN = "not run"


class Stopped(Exception):
    """Nothing more can be run; the message says why."""


@dataclass
class Row:
    """One kind in one place: why it cannot be built, or the faults of each mode (an empty list is a pass)."""

    kind: str
    place: str
    reason: str | None = None
    cells: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.place}"

    def failing(self) -> dict[str, list[str]]:
        """The modes that have faults."""
        return {mode: faults for mode, faults in self.cells.items() if faults and faults != [NOT_RUN]}

    def unrun(self) -> list[str]:
        """The modes that were not run."""
        return [mode for mode, faults in self.cells.items() if faults == [NOT_RUN]]


@dataclass
class Result:
    """Everything that one run of the matrix found.

    Attributes:
        about: the hardware and the releases.
        current: the row that is being worked on; set in a saved file when the process died in it.
        stopped: why the run ended early, or None.
    """

    about: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    current: str | None = None
    stopped: str | None = None

    def save(self, path: Path | None) -> None:
        """Writes JSON, whole or not at all."""
        if path is None:
            return
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_text(json.dumps(asdict(self), indent=1))
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Reads what `save` wrote."""
        raw = json.loads(path.read_text())
        return cls(raw["about"], [Row(**row) for row in raw["rows"]], raw["current"], raw["stopped"])

    def complete(self) -> bool:
        """True if every cell ran or cannot be built."""
        return self.stopped is None and not any(row.unrun() for row in self.rows)

    def failing(self) -> list[Row]:
        return [row for row in self.rows if row.failing()]


class Runner:
    """Works through rows until all are done, the time is over or the device is lost.

    Args:
        report: called with each finished row.
    """

    def __init__(self, setting: Setting, modes: list[Mode], result: Result, path: Path | None, report: Callable[[Row], None]) -> None:
        self.setting, self.modes, self.result = setting, modes, result
        self.path, self.report = path, report
        self.deadline = float("inf")

    def run(self, wanted: Iterable[tuple[Kind, Any]]) -> None:
        """Runs what the result does not have yet."""
        done = {row.name for row in self.result.rows}
        todo = [pair for pair in wanted if f"{pair[0].name}@{pair[1]}" not in done]
        for index, (kind, place) in enumerate(todo):
            row = Row(kind.name, place)
            self.result.rows.append(row)
            self.result.current = row.name
            self.result.save(self.path)
            try:
                self._row(kind, place, row)
            except Stopped as stop:
                self.result.stopped = str(stop)
                self._leave_out([(kind, place), *todo[index + 1 :]])
            self.report(row)
            if self.result.stopped is not None:
                break
        self.result.current = None
        self.result.save(self.path)

    def _row(self, kind: Kind, place: Any, row: Row) -> None:
        start = time.monotonic()
        self._in_time()
        row.reason = kind.runs(self.setting.device, place)
        self._alive(row.reason)
        if row.reason is None:
            # What this kind has just imported lives to the end, and each cell collects garbage.
            gc.collect()
            gc.freeze()
            for mode in self.modes:
                self._in_time()
                row.cells[mode.name], raised = self._cell(kind, mode, place)
                self._alive(f"{row.name} {mode.name}: {row.cells[mode.name][0]}" if raised else None)
        row.seconds = round(time.monotonic() - start, 2)

    def _cell(self, kind: Kind, mode: Mode, place: Any) -> tuple[list[str], bool]:
        """The faults of one cell, and whether they are an exception that came through."""
        try:
            return cells.run(kind, mode, self.setting, place), False
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().splitlines() or [""]
            where = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
            return [f"{type(error).__name__}: {text[0][:300]} ({where})"], True
        finally:
            gc.collect()

    def _alive(self, suspicion: str | None) -> None:
        if suspicion is not None and (error := broken(self.setting.device)) is not None:
            raise Stopped(f"the device is lost ({error}) after {suspicion}")

    def _in_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise Stopped("the time limit is reached")

    def _leave_out(self, rest: list[tuple[Kind, Any]]) -> None:
        """Every cell that did not run is in the table as that."""
        rows = {row.name: row for row in self.result.rows}
        for kind, place in rest:
            row = rows.get(f"{kind.name}@{place}") or Row(kind.name, place)
            if row.name not in rows:
                self.result.rows.append(row)
            for mode in self.modes if row.reason is None else ():
                row.cells.setdefault(mode.name, [NOT_RUN])


def reopen(result: Result, modes: list[Mode]) -> None:
    """Makes a saved result ready to go on: forgets what was not run, and fails the row that killed the process."""
    for row in result.rows:
        if row.name == result.current:
            row.cells = {mode.name: ["the process died in this row"] for mode in modes}
    result.rows = [row for row in result.rows if row.failing() or not row.unrun()]
    result.current = result.stopped = None


def fast() -> None:
    """Two forwards a cell and no other orders of the blocks."""
    cells.PASSES = 2
    cells.PLANS = ()


def unthreaded() -> None:
    """Tiny models and several processes side by side: threads only get into each other's way."""
    torch.set_num_threads(1)
