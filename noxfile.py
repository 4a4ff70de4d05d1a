"""The project's longer jobs: `nox -l` lists them."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "typing", "build"]

SETS = {
    # diffusers: the newest torchao that it imports with
    "0.33.1": "0.15.0",
    "0.34.0": "0.15.0",
    "0.35.2": "0.15.0",
    "0.36.0": "0.15.0",
    "0.37.1": "0.18.0",
    "0.38.0": "0.18.0",
    "0.39.0": "0.18.0",
    "0.40.0": "0.18.0",
    "0.41.0": "0.18.0",
    "0.42.1": "0.18.0",
}


def install_tests(session: nox.Session) -> None:
    session.install("-q", "pip>=25.1")
    session.install("-q", "--group", "test", "-e", ".")


def overlay(session: nox.Session, *requirements: str) -> dict[str, str]:
    """Put other releases in front of the installed ones, without their dependencies."""
    folder = Path(session.create_tmp()) / "overlay"
    session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(folder), *requirements)
    return {"PYTHONPATH": str(folder)}


@nox.session
@nox.parametrize("diffusers", list(SETS))
def tests(session: nox.Session, diffusers: str) -> None:
    """The test suite on one release of diffusers."""
    install_tests(session)
    variables = overlay(session, f"diffusers=={diffusers}", f"torchao=={SETS[diffusers]}")
    session.run("python", "-m", "pytest", "-m", "not overlay and not gpu", *session.posargs, "tests", env=variables)


@nox.session
def minimums(session: nox.Session) -> None:
    """The oldest releases of what the plugin itself needs."""
    install_tests(session)
    session.install("-q", "wrapt==2.4.*")
    variables = overlay(session, "diffusers==0.33.1", "torchao==0.9.0")
    session.run("python", "-m", "pytest", "-m", "not overlay and not gpu", *session.posargs, "tests", env=variables)


@nox.session
def matrix(session: nox.Session) -> None:
    """Every kind in every mode, on the newest releases and on the pairs of older ones; hours on two cores."""
    install_tests(session)
    files = ["tests/test_matrix.py", "tests/test_matrix_releases.py"]
    session.run("python", "-m", "pytest", *files, *session.posargs, env={"DIFFUSERS_OFFLOAD_FIX_FULL": "1"})


@nox.session
def cycles(session: nox.Session) -> None:
    """Fifty cycles of enabling, running and disabling, which must not cost memory."""
    install_tests(session)
    tests = ["tests/test_pipelines.py", "tests/test_removal.py", "-k", "cycles"]
    session.run("python", "-m", "pytest", *tests, *session.posargs, env={"DIFFUSERS_OFFLOAD_FIX_CYCLES": "50"})


@nox.session
def lint(session: nox.Session) -> None:
    session.install("-q", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    session.install("-q", "pip>=25.1")
    session.install("-q", "--group", "typing", "-e", ".")
    session.run("mypy")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel, and see that no startup file is in it."""
    session.install("-q", "build")
    folder = Path(session.create_tmp())
    session.run("python", "-m", "build", "--outdir", str(folder))
    for wheel in folder.glob("*.whl"):
        names = zipfile.ZipFile(wheel).namelist()
        startup = [name for name in names if name.endswith((".pth", ".start")) or "customize" in name]
        if startup:
            session.error(f"{wheel.name} holds {', '.join(startup)}")


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """A reduced matrix on a real accelerator, in the environment of nox; `python -m tests.gpu` runs all of it."""
    variables = {"DIFFUSERS_OFFLOAD_FIX_TEST_GPU": "1"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *session.posargs, "tests/gpu"]
    session.run(*command, external=True, env=variables)
