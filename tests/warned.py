"""What loggers warn of while a test looks."""

from __future__ import annotations

import logging


class Warned(logging.Handler):
    """The warnings of some loggers inside the `with` block, as lines of text."""

    def __init__(self, *loggers: str) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._loggers = [logging.getLogger(name) for name in loggers]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        for logger in self._loggers:
            logger.addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
