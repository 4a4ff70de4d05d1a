"""Importing this loads the simulated accelerator, for programs that take the name of a module to import first.

Older diffusers take the device too, from then on; they are imported before, because they look for CUDA while they load.
"""

from __future__ import annotations

import contextlib
import importlib

from tests import sim

sim.load()
importlib.import_module("diffusers.models.transformers.transformer_flux")
_whole_process = contextlib.ExitStack()
_whole_process.enter_context(sim.xpu_shim())
