"""A reduced matrix on the real GPU of this machine. `python -m tests.gpu` runs all of it and prints a table.

Each library has a process of its own: the simulated accelerator of the other tests is not there, and an illegal memory
access ends one test only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.setting import missing

ROOT = Path(__file__).resolve().parents[2]
MODES = "block,block+stream,block+stream+record,block+stream+low,leaf,leaf+stream,leaf+stream+low,block2"
#: Classes that compile CUDA code at their first use, for minutes.
SLOW = "qint4-awq,qint4-tinygemm,marlin,quanto-qint2,qfloat8"

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("library", ["plain-", "own-", "torchao-", "quanto-", "bnb-,gguf-,dtensor-"])
def test_every_kind_in_the_modes_that_differ(library: str) -> None:
    device = os.environ.get("DIFFUSERS_OFFLOAD_FIX_TEST_DEVICE", "cuda")
    reason = missing(device)
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.gpu", "--device", device, "--fast", "--kinds", library]
    command += ["--skip", SLOW, "--modes", MODES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
