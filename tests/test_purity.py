"""Importing the plugin before diffusers costs next to nothing: it may run in every interpreter of a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OWN = {"diffusers_offload_fix", "diffusers_offload_fix._startup", "diffusers_offload_fix.switches"}
LIMIT = 0.005

CODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
before, start = set(sys.modules), time.perf_counter()
import diffusers_offload_fix
seconds = time.perf_counter() - start
print(seconds, *sorted(set(sys.modules) - before))
"""


def imported(root: Path) -> tuple[float, set[str]]:
    """How long the import took in a bare interpreter, and which modules it brought."""
    command = [sys.executable, "-I", "-c", CODE, str(root)]
    seconds, *modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(seconds), set(modules)


def test_the_import_brings_only_its_own_modules() -> None:
    assert imported(ROOT)[1] == OWN


@pytest.mark.parametrize("name", ["logging", "typing", "wrapt"])
def test_the_check_can_fail(tmp_path: Path, name: str) -> None:
    shutil.copytree(ROOT / "diffusers_offload_fix", tmp_path / "diffusers_offload_fix")
    with (tmp_path / "diffusers_offload_fix" / "_startup.py").open("a") as file:
        file.write(f"\nimport {name}\n")
    assert imported(tmp_path)[1] > OWN


def test_the_import_is_fast() -> None:
    # The best of a few: the others say how busy the machine is.
    assert min(imported(ROOT)[0] for _ in range(7)) < LIMIT


def test_public_names_are_listed_without_being_loaded() -> None:
    code = "import sys, diffusers_offload_fix as d; print(dir(d)); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "['Status', '__version__', 'activate', 'deactivate', 'disable_group_offload', 'report']" in done.stdout
