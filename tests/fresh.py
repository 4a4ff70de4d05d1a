"""Code in a fresh interpreter: what is imported first matters to this plugin, and only a new process can tell."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from overlays import ROOT, pythonpath

SWITCHES = ("DIFFUSERS_OFFLOAD_FIX", "DIFFUSERS_OFFLOAD_FIX_SKIP", "AUTOWRAPT_BOOTSTRAP")
# Short names for what most of these programs use.
PRELUDE = """
import importlib, logging, sys
TARGET = "diffusers.hooks.group_offloading"
sys.modules["peft"] = None  # diffusers does without, and starts in half the time

def target():
    return importlib.import_module(TARGET)

def states():
    import diffusers_offload_fix
    return {status.state.value for status in diffusers_offload_fix.report()}

def is_applied():
    return "applied" in states() and states() <= {"applied", "fixed_upstream", "out_of_range", "waiting"}

def raw(module):
    from diffusers_offload_fix.methods import PATCHES
    from diffusers_offload_fix.patcher import locate
    spots = {patch.path: locate(module, patch.path) for patch in PATCHES}
    return {path: vars(owner).get(name) for path, (owner, name) in spots.items()}

class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("diffusers_offload_fix").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())
"""


def environment(diffusers: str | None = None, **switches: str) -> dict[str, str]:
    """The environment of a process that sees one release of diffusers and these switches of the plugin."""
    inherited = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    paths = [*pythonpath(diffusers), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **switches}


def python(*arguments: str | Path, diffusers: str | None = None, **switches: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter, and return what it did."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment(diffusers, **switches), capture_output=True, text=True, timeout=300)


def run(code: str, diffusers: str | None = None, **switches: str) -> str:
    """Run code after the prelude, and return what it printed. An assertion in it that fails fails the test."""
    done = python("-c", PRELUDE + textwrap.dedent(code), diffusers=diffusers, **switches)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
