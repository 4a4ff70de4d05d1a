"""The matrix on other releases: the modes whose bytes take different ways, on pairs of diffusers and torchao.

Each pair has a process of its own, on the simulated accelerator. `nox -s matrix` runs every kind in every mode instead.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import overlays

PAIRS = (
    ("0.33.1", "0.9.0"),
    ("0.35.2", "0.15.0"),
    ("0.37.1", "0.15.0"),
    ("0.38.0", "0.17.0"),
    ("0.42.1", "0.15.0"),
    ("0.42.1", "0.17.0"),
)
KINDS = "plain-bfloat16,plain-tied,plain-changing,own-nested,own-repack-class,torchao-int8wo,torchao-intx-int4,quanto-qint8"
MODES = "block,block2,block+stream,block+stream+low,leaf+stream+record"

pytestmark = pytest.mark.overlay


@pytest.mark.parametrize(("diffusers", "torchao"), PAIRS)
def test_reduced_matrix(diffusers: str, torchao: str) -> None:
    everything = bool(os.environ.get("DIFFUSERS_OFFLOAD_FIX_FULL"))
    folders = [overlays.overlay("diffusers", diffusers), overlays.overlay("torchao", torchao)]
    path = os.pathsep.join([str(overlays.ROOT), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.gpu", "--device", "npu", "--time-limit", "3000" if everything else "240"]
    if not everything:
        command += ["--fast", "--kinds", KINDS, "--modes", MODES]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=overlays.ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"diffusers {diffusers}" in done.stdout
    assert f"torchao {torchao}" in done.stdout
