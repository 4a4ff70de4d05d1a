"""Other releases of diffusers and torchao, each in a folder of its own that goes in front of `PYTHONPATH`.

DIFFUSERS_OFFLOAD_FIX_OVERLAYS may name a folder that holds some of them, called `diffusers-0.33.1` and so on. What is
not there is installed into the cache folder `.overlays` of the checkout, once, without its dependencies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "DIFFUSERS_OFFLOAD_FIX_OVERLAYS"
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".overlays"
# The releases that the tests run against besides the installed one: the oldest, and one before and after each change.
RELEASES = ("0.33.1", "0.35.2", "0.37.1", "0.38.0")
# diffusers up to 0.36 does not import with a newer torchao.
TORCHAO = {"0.33": "0.15.0", "0.34": "0.15.0", "0.35": "0.15.0", "0.36": "0.15.0"}


def overlay(name: str, version: str) -> Path:
    """The folder that holds this release, installed if need be. Raises CalledProcessError when pip fails."""
    label = f"{name}-{version}"
    given = os.environ.get(VARIABLE)
    if given and (Path(given) / label).is_dir():
        return Path(given) / label
    folder = CACHE / label
    with _locked(CACHE / f"{label}.lock"):
        if not folder.is_dir():
            _install(f"{name}=={version}", folder)
    return folder


def pythonpath(diffusers: str | None) -> list[str]:
    """What goes in front of the search path for one release of diffusers; None is the installed one."""
    if diffusers is None:
        return [str(ROOT)]
    folders = [overlay("diffusers", diffusers)]
    torchao = TORCHAO.get(diffusers.rpartition(".")[0])
    if torchao is not None:
        folders.append(overlay("torchao", torchao))
    return [str(ROOT), *map(str, folders)]


def _install(requirement: str, folder: Path) -> None:
    # Installed aside and renamed, so that an interrupted run leaves no half-filled folder behind.
    aside = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(aside), requirement]
        subprocess.run(command, check=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
