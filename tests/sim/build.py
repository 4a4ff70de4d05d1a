"""Compiles the simulated accelerator once for each version of its sources and of torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

SOURCES = Path(__file__).parent / "native"


class BuildError(RuntimeError):
    """The simulated accelerator cannot be compiled here."""


def library() -> Path:
    """The path of the compiled library, which is built on the first call on this machine."""
    target = _cache_dir() / f"sim_npu_{_fingerprint()}.so"
    if target.exists():
        return target
    # Test workers start together: the first one compiles, the others wait for it.
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            _compile(target)
    return target


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for root in (Path(base), Path(tempfile.gettempdir())):
        path = root / "diffusers-offload-fix-sim"
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK):
                return path
    raise BuildError("no writable directory for the compiled simulator")


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__} {_flags()}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _flags() -> list[str]:
    standard = "c++20" if _version() >= (2, 9) else "c++17"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    # The lowest level that inlines: the compile time is what every fresh checkout pays.
    return [f"-std={standard}", "-O1", "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]


def _compile(target: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise BuildError("the simulated accelerator needs g++ (or CXX): none was found on PATH")
    lib = Path(torch.__file__).parent / "lib"
    # One translation unit: torch's headers are what takes the time, and they are read once.
    unit = "".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*.cpp")))
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *_flags(), f"-I{SOURCES}", *(f"-I{path}" for path in include_paths())]
    command += ["-x", "c++", "-", "-o", str(scratch), f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
    if done.returncode:
        scratch.unlink(missing_ok=True)
        raise BuildError(f"{compiler} failed on the simulated accelerator:\n{done.stderr[-4000:]}")
    scratch.replace(target)
