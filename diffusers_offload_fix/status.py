"""The state of every fix, asked from the live classes each time."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

from diffusers_offload_fix import _startup, patcher, switches, versions
from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.patcher import Patch, Place

SURFACE = ("ModuleGroup", "GroupOffloadingHook", "LazyPrefetchGroupOffloadingHook", "apply_group_offloading")


class State(str, Enum):
    """What can be said of a fix."""

    APPLIED = "applied"
    FIXED_UPSTREAM = "fixed_upstream"
    OUT_OF_RANGE = "out_of_range"
    SKIPPED = "skipped"
    CONFLICT = "conflict"
    DRIFTED = "drifted"
    FAILED = "failed"
    WAITING = "waiting"
    DISPLACED = "displaced"
    INACTIVE = "inactive"


# States in which the bug is absent, or is cured.
GOOD = frozenset({State.APPLIED, State.FIXED_UPSTREAM, State.OUT_OF_RANGE})


@dataclass(frozen=True)
class Status:
    """One upstream bug: what it is, and what has become of it in this process."""

    id: str
    name: str
    state: State
    detail: str
    cure: str
    summary: str
    issues: tuple[str, ...]
    versions: str

    @property
    def is_good(self) -> bool:
        """Whether the bug is absent or cured, or will be as soon as the part of diffusers that has it is imported."""
        return self.state in GOOD or (self.state is State.WAITING and target() is not None)


Verdict = tuple[State, str]

# Why a cure could not be installed. Only words for a state that the live classes show anyway.
failures: dict[str, str] = {}


# Modules whose code has run, although their import has not returned yet.
executed: weakref.WeakSet[ModuleType] = weakref.WeakSet()


def target() -> ModuleType | None:
    """The target module once it is loaded completely, else None."""
    return loaded(_startup.TARGET)


def home(module: ModuleType, cure: str, patches: tuple[Patch, ...]) -> tuple[str, ModuleType | None]:
    """The name of the module that a cure patches, and the module once it is loaded completely; `module` is the target."""
    name = next((patch.target for patch in patches if patch.cure == cure), _startup.TARGET)
    return name, module if name == _startup.TARGET else loaded(name)


def loaded(name: str) -> ModuleType | None:
    """A module once it is loaded completely, else None."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    is_running = getattr(spec, "_initializing", False) and module not in executed
    return None if is_running else module


def gate(module: ModuleType | None) -> Verdict | None:
    """Why nothing may be patched: nothing to patch, too old, or a target that has changed beyond recognition."""
    found = versions.installed("diffusers")
    if found is None:
        return State.WAITING, "diffusers is not installed"
    if not versions.within(found, versions.DIFFUSERS):
        return State.OUT_OF_RANGE, f"needs diffusers{versions.DIFFUSERS}, {found} is installed"
    if module is None:
        return State.WAITING, f"{_startup.TARGET} is not imported yet"
    lacking = [name for name in SURFACE if not hasattr(module, name)]
    if lacking:
        return State.DRIFTED, f"diffusers {found} has no {', '.join(lacking)}"
    return None


def skipping(cure: str, fixes: tuple[Fix, ...]) -> list[str]:
    """The names in DIFFUSERS_OFFLOAD_FIX_SKIP that leave this cure out."""
    names = {cure} | {fix.name for fix in fixes if fix.cure == cure}
    return sorted(names & switches.skipped())


def cure_verdict(module: ModuleType, cure: str, patches: tuple[Patch, ...], fixes: tuple[Fix, ...]) -> Verdict:
    """The state of a cure's patches on the live classes; `module` is the target."""
    name, found = home(module, cure, patches)
    if found is None and not skipping(cure, fixes) and not switches.is_off():
        return State.WAITING, f"{name} is not imported yet"
    module = found or module
    places = {patch.path: patcher.look(module, patch) for patch in patches if patch.cure == cure}
    at = {place: [path for path, found in places.items() if found is place] for place in Place}
    if places and len(at[Place.OURS]) == len(places):
        return State.APPLIED, ""
    if at[Place.DISPLACED]:
        return State.DISPLACED, f"overwritten by somebody else: {', '.join(at[Place.DISPLACED])}"
    skips = skipping(cure, fixes)
    if skips:
        return State.SKIPPED, f"{switches.SKIP} names {', '.join(skips)}, cured by {cure!r}"
    if at[Place.FOREIGN]:
        return State.CONFLICT, f"already patched by somebody else: {', '.join(at[Place.FOREIGN])}"
    if at[Place.DRIFTED]:
        return State.DRIFTED, f"not as expected: {', '.join(at[Place.DRIFTED])}"
    if cure in failures:
        return State.FAILED, failures[cure]
    return State.INACTIVE, "switched off" if switches.is_off() else "not activated"


def fix_verdict(fix: Fix, module: ModuleType, cure: Verdict) -> Verdict:
    """The state of one fix, given its cure's: whether upstream has the bug at all comes first."""
    found = versions.installed("diffusers") or ""
    if not versions.within(found, fix.versions):
        older = versions.is_older(found, fix.versions)
        return (State.OUT_OF_RANGE if older else State.FIXED_UPSTREAM), f"in diffusers{fix.versions}"
    for requirement in fix.needs:
        reason = versions.missing(requirement)
        if reason:
            return State.OUT_OF_RANGE, reason
    if cure[0] in (State.CONFLICT, State.DRIFTED, State.DISPLACED):
        return cure
    return _probed(fix, module, cure)


def _probed(fix: Fix, module: ModuleType, cure: Verdict) -> Verdict:
    try:
        if not fix.is_in_upstream(module):
            return State.FIXED_UPSTREAM, "the probe no longer finds it"
        if cure[0] is State.APPLIED and fix.probe(module):
            return State.FAILED, "the probe still finds it"
    except Exception as error:
        return State.FAILED, f"the probe raised {type(error).__name__}: {error}"
    return cure


def statuses(module: ModuleType | None, patches: tuple[Patch, ...], fixes: tuple[Fix, ...]) -> tuple[Status, ...]:
    """The status of every fix, sorted as `fixes` is."""
    closed = gate(module)
    if closed is not None or module is None:
        verdicts = [closed or (State.WAITING, "")] * len(fixes)
    else:
        cures = {fix.cure: cure_verdict(module, fix.cure, patches, fixes) for fix in fixes}
        verdicts = [fix_verdict(fix, module, cures[fix.cure]) for fix in fixes]
    return tuple(_status(fix, verdict) for fix, verdict in zip(fixes, verdicts))


def _status(fix: Fix, verdict: Verdict) -> Status:
    return Status(
        id=fix.id,
        name=fix.name,
        state=verdict[0],
        detail=verdict[1],
        cure=fix.cure,
        summary=fix.summary,
        issues=fix.issues,
        versions=fix.versions,
    )
