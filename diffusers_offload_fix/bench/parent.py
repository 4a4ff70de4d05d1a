"""The parent's half: starts the process of a variant, shows how far it is, and keeps what it said if it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from diffusers_offload_fix import switches

from .options import Options

#: First characters of the lines that a child writes while it works; its last line is the whole result as JSON.
STEP, CASE, COUNT, HEAD = "@ ", "= ", "# ", "% "
WIDTH = 24


class Progress:
    """A bar on a terminal, or a line for each case elsewhere."""

    def __init__(self, out: IO[str], total: int) -> None:
        self.out, self.total, self.done = out, max(total, 1), 0
        self.live = out.isatty()

    def step(self, label: str) -> None:
        """Says what is being done now."""
        if not self.live:
            return
        full = WIDTH * self.done // self.total
        self.out.write(f"\r\033[K[{'#' * full}{'.' * (WIDTH - full)}] {self.done}/{self.total} {label}")
        self.out.flush()

    def case(self, text: str) -> None:
        """A case is done; says how it went."""
        self.done += 1
        self.out.write(f"{chr(13) + chr(27) + '[K' if self.live else ''}{text}\n")
        self.out.flush()

    def close(self) -> None:
        if self.live:
            self.out.write("\r\033[K")
            self.out.flush()


class Child:
    """One variant, with some kinds of weights, in a process of its own, which times or counts."""

    def __init__(
        self,
        options: Options,
        variant: str,
        quants: tuple[str, ...],
        folder: Path,
        deadline: float,
        progress: Progress,
        counting: bool = False,
    ) -> None:
        self.options, self.variant, self.quants, self.folder = options, variant, quants, folder
        self.deadline, self.progress, self.counting = deadline, progress, counting
        self.cases: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.head: dict[str, Any] = {}
        self.result: dict[str, Any] | None = None
        self.interrupted = False

    def run(self) -> dict[str, Any]:
        """What the child found; if it died, was interrupted or ran out of time, what it had found until then, and `error`."""
        left = self.deadline - time.time()
        if left < 1:
            return {"cases": {}, "error": "not run: the time limit was reached"}
        log = self.folder / f"{self.variant}-{'-'.join(self.quants)}{'-counts' if self.counting else ''}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(self._command(), env=self._environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
            killer = threading.Timer(left + 20, process.kill)
            killer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    self.hear(line)
                process.wait()
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                killer.cancel()
                if process.poll() is None:
                    process.kill()
        if self.result is not None:
            return self.result
        error = f"ended with status {process.wait()}: {self._reason(log)}"
        self.progress.case(f"{self.variant}: {error}")
        return {**self.head, "cases": self.cases, "counts": self.counts, "error": error}

    def _reason(self, log: Path) -> str:
        if self.interrupted:
            return "interrupted"
        if time.time() > self.deadline:
            return "the time limit was reached"
        tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return " ".join(tail)[:300]

    def hear(self, line: str) -> None:
        """Takes one line of the child's output."""
        if line.startswith(STEP):
            self.progress.step(f"{self.variant}: {line[len(STEP) :].strip()}")
        elif line.startswith(CASE):
            found = json.loads(line[len(CASE) :])
            self.cases.update(found)
            for key, case in found.items():
                self.progress.case(f"{self.variant:10s} {key:34s} {brief(case)}")
        elif line.startswith(COUNT):
            found = json.loads(line[len(COUNT) :])
            self.counts.update(found)
            for key, case in found.items():
                figures = ", ".join(f"{value} {figure}" for figure, value in case.items())
                self.progress.case(f"{self.variant:10s} {key:34s} {figures}")
        elif line.startswith(HEAD):
            self.head = json.loads(line[len(HEAD) :])
        elif line.startswith("{"):
            self.result = json.loads(line)

    def _command(self) -> list[str]:
        module = f"{__package__}.work"
        arguments = [self.options.dumps(), self.variant, ",".join(self.quants), str(self.folder), str(self.deadline)]
        return [sys.executable, "-m", module, *arguments, *(["count"] if self.counting else [])]

    def _environment(self) -> dict[str, str]:
        value = "1" if self.variant == "patched" else "0"
        return {**os.environ, switches.MODE: value, "PYTHONUNBUFFERED": "1"}


def brief(case: dict[str, Any]) -> str:
    """One case in a few words."""
    if case.get("error"):
        return f"fails: {case['error'][:100]}"
    equal = "" if case.get("equal") is None else ", equal" if case["equal"] else ", DIFFERENT"
    return f"{case['ms']:8.1f} ms{equal}"
