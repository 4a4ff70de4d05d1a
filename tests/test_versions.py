"""Version ranges."""

from __future__ import annotations

import sys
import types

import pytest

from diffusers_offload_fix import versions


@pytest.mark.parametrize(
    ("version", "is_in"),
    [
        ("0.32.2", False),
        ("0.33.0", True),
        ("0.33.0.dev0", False),
        ("0.43.0.dev0", True),
        ("1.0rc1", True),
        ("custom", True),
    ],
)
def test_the_range_of_diffusers(version: str, is_in: bool) -> None:
    assert versions.within(version, versions.DIFFUSERS) is is_in


@pytest.mark.parametrize(
    ("version", "specifier", "is_older"),
    [
        ("0.34.0", "==0.35.*", True),
        ("0.36.0", "==0.35.*", False),
        ("0.33.1", ">=0.38", True),
        ("0.42.1", ">=0.33,<0.38", False),
    ],
)
def test_older_is_told_from_newer(version: str, specifier: str, is_older: bool) -> None:
    assert versions.is_older(version, specifier) is is_older


def test_a_loaded_module_goes_before_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("diffusers")
    module.__version__ = "0.43.0.dev0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "diffusers", module)
    assert versions.installed("diffusers") == "0.43.0.dev0"


def test_what_is_not_installed() -> None:
    assert versions.installed("no-such-distribution") is None
    assert versions.missing("no-such-distribution>=1") == "no-such-distribution is not installed"


def test_what_is_too_old_says_what_is_wanted_and_what_is_there() -> None:
    assert versions.missing("packaging") is None
    found = versions.installed("packaging")
    assert versions.missing("packaging<1") == f"needs packaging<1, {found} is installed"
