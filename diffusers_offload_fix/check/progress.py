"""A progress bar on a terminal: tqdm's if it is there, else a line of our own; nothing anywhere else."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class Progress:
    """Counts cases on stderr while it is a terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.count = total, 0
        self.bar: Any = None
        self.shown = sys.stderr.isatty()
        if self.shown:
            self.bar = _tqdm(total)

    def step(self, label: str) -> None:
        """Notes that one more is done."""
        self.count += 1
        if self.bar is not None:
            self.bar.set_postfix_str(label, refresh=False)
            self.bar.update()
        elif self.shown:
            sys.stderr.write(f"\r\033[K{self.count} of {self.total}: {label}")
            sys.stderr.flush()

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            sys.stderr.write("\r\033[K")


def _tqdm(total: int) -> Any:
    try:
        module = importlib.import_module("tqdm")
    except ImportError:
        return None
    return module.tqdm(total=total, desc="check", leave=False, file=sys.stderr)
