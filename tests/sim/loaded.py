"""Importing this loads the simulated accelerator, for programs that take the name of a module to import first.

Older diffusers take the device too, from then on.
"""

from __future__ import annotations

import contextlib

from tests import sim

sim.load()
_whole_process = contextlib.ExitStack()
_whole_process.enter_context(sim.xpu_shim())
