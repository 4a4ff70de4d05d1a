"""The half of `check` that starts workers, and starts another one where one dies or hangs."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from diffusers_offload_fix import switches
from diffusers_offload_fix.check.cases import Case
from diffusers_offload_fix.check.worker import MARK

Message = dict[str, Any]
#: Seconds that a worker may take until its first message: it imports torch, diffusers and what these import.
START = 300.0


class Side:
    """One side of the comparison: all cases, without the plugin or with it.

    Attributes:
        hello: what the worker says of the device; empty if none came so far.
        results: the outcome of each case that is done.
    """

    def __init__(self, patched: bool, device: str | None, timeout: float, folder: str | None = None) -> None:
        self.patched, self.device, self.timeout, self.folder = patched, device, timeout, folder
        self.hello: Message = {}
        self.results: dict[Case, Message] = {}

    def run(self, cases: list[Case], on_result: Callable[[Case, Message], bool]) -> None:
        """Runs the cases. `on_result` is told each outcome, and returns False to stop."""
        while rest := [case for case in cases if case not in self.results]:
            for case, message in self._one_worker(rest):
                self.results[case] = message
                if not on_result(case, message):
                    return

    def _one_worker(self, cases: list[Case]) -> Iterator[tuple[Case, Message]]:
        """Yields outcomes until the worker ends. One that ends early or hangs fails the case that it was at."""
        rest = list(cases)
        has_started = False
        with _Process(self._command(cases), self._environment()) as process:
            for message in process.messages(self.timeout):
                has_started = True
                if message["what"] == "hello":
                    self.hello = self.hello or message
                elif message["what"] == "done":
                    yield rest.pop(0), message
            if not rest or process.is_replaced():
                return
            failed = {"state": "error", "equal": False, "detail": process.last_words(self.timeout)}
            # Without as much as a hello, another one would do no better.
            for case in rest[:1] if has_started else rest:
                yield case, failed

    def _command(self, cases: list[Case]) -> list[str]:
        request = {"device": self.device, "folder": self.folder, "cases": [[case.weights, case.mode] for case in cases]}
        return [sys.executable, "-m", "diffusers_offload_fix.check.worker", json.dumps(request)]

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != switches.SKIP}
        return {**inherited, switches.MODE: "1" if self.patched else "0"}


class _Process:
    """A worker's process, whose messages are read as they come."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.is_late = False
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(5)
        self.errors.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def messages(self, timeout: float) -> Iterator[Message]:
        """Yields the worker's messages until it ends, or is silent for `timeout` seconds."""
        patience = max(timeout, START)
        while True:
            try:
                line = self.lines.get(timeout=patience)
            except queue.Empty:
                self.is_late = True
                self.process.kill()
                return
            if line is None:
                self.process.wait()
                return
            if line.startswith(MARK):
                patience = timeout
                yield json.loads(line[len(MARK) :])

    def is_replaced(self) -> bool:
        """True if the worker ended because it found its device unusable after a case."""
        return self.process.returncode == 3

    def last_words(self, timeout: float) -> str:
        """Why the worker ended before its time."""
        if self.is_late:
            return f"nothing happened for {timeout:g} s"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        code = self.process.returncode
        ended = f"the process was ended by signal {-code}" if code < 0 else f"the process ended with status {code}"
        return f"{ended}: {lines[-1][:200]}" if lines else ended
