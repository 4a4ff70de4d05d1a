"""Denoising loops: what a pipeline's progress bar spans.

Every pipeline of diffusers opens a progress bar around its denoising steps. While it is open, the models that run keep their device
slots from one step to the next (see `idle`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from . import idle

Function = Callable[..., Any]


class _Close:
    """A bar's `close`, which also ends the loop; it does not keep the bar alive."""

    def __init__(self, bar: Any, loop: idle.Loop) -> None:
        self._bar = weakref.ref(bar)
        self._loop = loop

    def __call__(self) -> Any:
        self._loop.end()
        bar = self._bar()
        return None if bar is None else type(bar).close(bar)


def mark(bar: Any) -> Any:
    """Makes a progress bar (tqdm's, or anything with `close`) the span of a loop; returns it."""
    loop = idle.Loop()
    try:
        bar.close = _Close(bar, loop)
        # A bar that is not closed is let go of.
        weakref.finalize(bar, loop.end, wait=False).atexit = False
    except (AttributeError, TypeError):
        # Somebody's own bar, which cannot tell when it is over: the loop does not count.
        loop.end()
    return bar


def progress_bar(original: Function) -> Function:
    """Replaces `DiffusionPipeline.progress_bar`."""

    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's progress bar; offloaded models keep their device slots while it is open."""
        return mark(original(self, *args, **kwargs))

    return marked
