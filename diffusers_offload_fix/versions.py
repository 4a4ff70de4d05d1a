"""Which versions are installed, and whether they are in a range."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

DIFFUSERS = ">=0.33"
TORCHAO = ">=0.7"


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None. A loaded module's own word goes before its metadata."""
    module = sys.modules.get(distribution.replace("-", "_"))
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def within(version: str, specifier: str) -> bool:
    """Whether `version` satisfies `specifier`. Development and pre-releases count: 0.43.0.dev0 is in >=0.33.

    A version that is not PEP 440 (a local build's tag) counts as in range, because the live checks decide then.
    """
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def is_older(version: str, specifier: str) -> bool:
    """Whether `version` is below the lower end of `specifier`: the thing is not there yet, rather than gone again."""
    lower = [item.version.removesuffix(".*") for item in SpecifierSet(specifier) if item.operator in (">=", "==", "~=")]
    try:
        return any(Version(version) < Version(bound) for bound in lower)
    except InvalidVersion:
        return False


def missing(requirement: str) -> str | None:
    """Why `requirement` ("torchao>=0.16,<0.18") is not met, in words that say what is wanted and what is there."""
    wanted = Requirement(requirement)
    found = installed(wanted.name)
    if found is None:
        return f"{wanted.name} is not installed"
    if not within(found, str(wanted.specifier)):
        return f"needs {requirement}, {found} is installed"
    return None
