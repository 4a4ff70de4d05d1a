"""Every upstream bug: its file, and its probe on the releases that have it and on those that have not."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from fresh import run
from overlays import RELEASES
from packaging.specifiers import SpecifierSet

from diffusers_offload_fix import fixes, versions

FOLDER = Path(fixes.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
# The rows of the field reports that this release must know.
IDS = {f"Q{number}" for number in (1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13, 14, 15)}
IDS |= {f"D{number}" for number in range(1, 9)} | {"M1"}
IDS |= {f"G{number}" for number in (*range(1, 12), 13, 14, *range(20, 24))} | {"M2", "R1", "tied", "dtype", "moved", "pipe", "mpipe"}

CONTRACT = """
import gc, time, warnings
import torch
module = target()
import diffusers
from diffusers_offload_fix import activate, deactivate, versions
from diffusers_offload_fix.fixes import _weights, all_fixes

deactivate()
fixes = all_fixes()
found = diffusers.__version__
classes = [entry for entry in vars(module).values() if isinstance(entry, type) and entry.__module__ == TARGET]

def snapshot():
    names = [(module, vars(module))] + [(cls, vars(cls)) for cls in classes]
    entries = [(owner, name, id(entry)) for owner, table in names for name, entry in table.items()]
    return entries, torch.get_rng_state().tolist(), logging.getLogger(TARGET).handlers[:], warnings.filters[:]

def ask():
    answers = {}
    for fix in fixes:
        before, start = snapshot(), time.perf_counter()
        answers[fix.id] = fix.probe(module)
        seconds = time.perf_counter() - start
        assert snapshot() == before, f"{fix.id} leaves a trace"
        assert seconds < 0.5, f"{fix.id} takes {seconds} s"
    return answers

expected = {fix.id: versions.within(found, fix.versions) for fix in fixes}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    before = ask()
assert before == expected, {id: answer for id, answer in before.items() if answer != expected[id]}
assert not torch.cuda.is_initialized()
gc.collect()
assert not any(isinstance(thing, _weights.Weight) for thing in gc.get_objects()), "a weight is left over"
activate()
assert is_applied(), states()
live = ask()
assert not any(live.values()), [id for id, answer in live.items() if answer]
assert {fix.id: fix.is_in_upstream(module) for fix in fixes} == expected, "the evidence must not depend on the patches"
deactivate()
assert ask() == expected
print(sum(expected.values()))
"""


@pytest.mark.parametrize("name", NAMES)
def test_each_file_holds_one_fix(name: str) -> None:
    module = importlib.import_module(f"{fixes.__name__}.{name}")
    fix = module.FIX
    assert fix.name == name
    assert len((module.__doc__ or "").splitlines()) >= 3, "the docstring says what is wrong, and where the real evidence is"
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue) for issue in fix.issues)
    assert fix.summary and not fix.summary.endswith(".")
    assert SpecifierSet(fix.versions)
    assert fix.cure in ("mover", "pipelines", "models", "modular")


def test_the_fixes_are_found_and_sorted() -> None:
    found = fixes.all_fixes()
    assert sorted(fix.name for fix in found) == NAMES
    assert [fix.id for fix in found if fix.id.startswith("Q")][:3] == ["Q1", "Q2", "Q3"]
    assert len({fix.id for fix in found}) == len(found)
    assert {fix.id for fix in found} >= IDS


def test_every_release_in_range_has_a_bug_to_cure() -> None:
    for release in RELEASES:
        assert any(versions.within(release, fix.versions) for fix in fixes.all_fixes())


@pytest.mark.parametrize("release", [None, *(pytest.param(name, marks=pytest.mark.overlay) for name in RELEASES)])
def test_each_probe_tells_the_bug_from_the_cure(release: str | None) -> None:
    assert int(run(CONTRACT, diffusers=release).split()[-1]) > 10
