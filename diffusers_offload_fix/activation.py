"""Turning the plugin on and off."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType

from diffusers_offload_fix import _startup, patcher, status, switches, versions
from diffusers_offload_fix.fixes import Fix, all_fixes
from diffusers_offload_fix.patcher import Patch
from diffusers_offload_fix.status import State

logger = logging.getLogger("diffusers_offload_fix")

_lock = threading.RLock()


class ActivationError(RuntimeError):
    """The plugin could not be applied, and DIFFUSERS_OFFLOAD_FIX=strict asks that this be an error."""


def activate() -> None:
    """Patch diffusers' group offloading now, or as soon as it is imported. Twice is once.

    Raises SwitchError (a ValueError) when an environment variable of the plugin holds an unknown value, and
    ActivationError (a RuntimeError) when DIFFUSERS_OFFLOAD_FIX=strict and the plugin cannot be applied.
    Otherwise what prevents it is logged, and diffusers is left as it is.
    """
    if switches.mode() == "0":
        logger.warning("not activated: %s=0", switches.MODE)
        return
    if switches.skipped():
        switches.check_skipped(_valid_names(all_fixes()))
    _startup.arm()
    target_found()


def deactivate() -> None:
    """Take the patches out again and stop waiting for diffusers. The original objects are put back, the same ones.

    Modules that are group-offloaded at that moment keep working: the mover hands them over first.
    """
    _startup.disarm()
    with _lock:
        methods = sys.modules.get("diffusers_offload_fix.methods")
        if methods is not None and status.target() is not None:
            methods.release()
        left = patcher.undo()
        status.failures.clear()
    if left:
        logger.warning("left alone, because somebody else has patched them since: %s", ", ".join(left))


def target_found() -> None:
    """Patch the target if it is in sys.modules, waiting for a thread that is importing it just now."""
    if _startup.TARGET not in sys.modules:
        return
    # Outside the lock: the importing thread may be on its way to `target_loaded`, which takes it.
    module = importlib.import_module(_startup.TARGET)
    if status.target() is not module:
        logger.warning("not activated: %s is being imported by the caller; call activate() later", _startup.TARGET)
        return
    target_loaded(module)


def target_loaded(module: ModuleType) -> None:
    """Patch the target. Errors are logged, so that the import of diffusers never fails, unless the mode is strict."""
    with _lock:
        _guarded(lambda: _apply(module))


def other_loaded(module: ModuleType) -> None:
    """Patch a module beside the target, if the target is there; if not, it is patched along with the target."""
    with _lock:
        status.executed.add(module)
        main = status.target()
        if main is not None:
            _guarded(lambda: _apply(main, module.__name__))


def patches() -> tuple[Patch, ...]:
    """What the plugin installs in this release. Imports torch, so only once the target is loaded."""
    from diffusers_offload_fix import conversion, methods, pipelines

    found = versions.installed("diffusers") or ""
    everything = (*methods.PATCHES, *pipelines.PATCHES, *conversion.PATCHES)
    return tuple(patch for patch in everything if versions.within(found, patch.versions))


def _guarded(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        if switches.is_strict():
            patcher.undo()
            raise
        logger.warning("diffusers is left unpatched: %s: %s", type(error).__name__, error)


def _apply(module: ModuleType, only: str | None = None) -> None:
    fixes = all_fixes()
    _check_switches(fixes)
    _check_torchao()
    closed = status.gate(module)
    if closed is not None:
        return _complain(f"diffusers is left unpatched: {closed[1]}")
    everything = patches()
    for cure in dict.fromkeys(patch.cure for patch in everything if only in (None, patch.target)):
        _apply_cure(module, cure, everything, fixes)


def _apply_cure(module: ModuleType, cure: str, everything: tuple[Patch, ...], fixes: tuple[Fix, ...]) -> None:
    status.failures.pop(cure, None)
    state, detail = status.cure_verdict(module, cure, everything, fixes)
    mine = [fix for fix in fixes if fix.cure == cure]
    if state in (State.APPLIED, State.WAITING):
        return
    if state is State.SKIPPED:
        logger.warning("cure %r is left out (%s); these bugs stay: %s", cure, detail, _ids(mine))
    elif state is not State.INACTIVE:
        _complain(f"cure {cure!r} is not installed: {detail}")
    elif _is_wanted(module, mine):
        _install(module, cure, everything, mine)


def _install(module: ModuleType, cure: str, everything: tuple[Patch, ...], fixes: list[Fix]) -> None:
    place = status.home(module, cure, everything)[1]
    try:
        assert place is not None
        patcher.install(place, [patch for patch in everything if patch.cure == cure])
        remaining = [fix for fix in fixes if fix.probe(module)]
        if remaining:
            raise patcher.PatchError(f"the probes still find {_ids(remaining)}")
    except Exception as error:
        patcher.undo(cure, place, everything)
        status.failures[cure] = str(error)
        return _complain(f"cure {cure!r} is not installed: {error}")
    logger.info("cure %r is installed in diffusers %s: %s", cure, versions.installed("diffusers"), _ids(fixes))


def _is_wanted(module: ModuleType, fixes: list[Fix]) -> bool:
    """Whether upstream has one of the bugs: a release without any is left as it is."""
    if any(fix.is_in_upstream(module) for fix in fixes):
        return True
    logger.info("diffusers %s has none of these bugs: %s", versions.installed("diffusers"), _ids(fixes))
    return False


def _check_switches(fixes: tuple[Fix, ...]) -> None:
    try:
        switches.mode()
        switches.check_skipped(_valid_names(fixes))
    except switches.SwitchError as error:
        if switches.is_strict():
            raise
        logger.warning("%s", error)


def _check_torchao() -> None:
    found = versions.installed("torchao")
    if found is not None and not versions.within(found, versions.TORCHAO):
        logger.warning(
            "torchao %s is older than what this plugin knows (needs torchao%s): its weights are untested",
            found,
            versions.TORCHAO,
        )


def _ids(fixes: list[Fix]) -> str:
    return ", ".join(fix.id for fix in fixes)


def _valid_names(fixes: tuple[Fix, ...]) -> frozenset[str]:
    return frozenset(name for fix in fixes for name in (fix.name, fix.cure))


def _complain(message: str) -> None:
    """One warning, or the error that strict mode asks for."""
    if switches.is_strict():
        raise ActivationError(message)
    logger.warning("%s", message)
