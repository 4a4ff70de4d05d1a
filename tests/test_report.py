"""The account, and the command line."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from fresh import python, run

import diffusers_offload_fix
from diffusers_offload_fix import __main__, status, switches, versions
from diffusers_offload_fix.status import State

COMMAND = ("-m", "diffusers_offload_fix")


def without(monkeypatch: pytest.MonkeyPatch, **found: str | None) -> None:
    """Pretend that these distributions have these versions."""
    real = versions.installed
    pretended = {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(versions, "installed", lambda name: pretended[name] if name in pretended else real(name))


def test_json_for_bug_reports() -> None:
    done = python(*COMMAND, "--json")
    assert done.returncode == 0, done.stderr
    account = json.loads(done.stdout)
    environment = account["environment"]
    assert {"python", "torch", "diffusers", "torchao", "optimum-quanto", "accelerate", "wrapt"} <= set(environment)
    assert {"device", "switches"} <= set(environment)
    assert environment["switches"] == {switches.MODE: None, switches.SKIP: None}
    rows = {row["id"]: row for row in account["fixes"]}
    assert rows["Q2"]["state"] == "applied" and rows["Q2"]["issues"][0] == "huggingface/diffusers#14433"
    assert {row["state"] for row in rows.values()} <= {state.value for state in status.GOOD}


def test_text_has_a_line_for_each_bug_and_tells_what_is_not_cured() -> None:
    done = python(*COMMAND, DIFFUSERS_OFFLOAD_FIX_SKIP="mover")
    assert done.returncode == 1
    assert "torchao_low_cpu_alias" in done.stdout and "diffusers#14433" in done.stdout
    assert "DIFFUSERS_OFFLOAD_FIX_SKIP=mover" in done.stdout and "skipped" in done.stdout
    assert "are not" in done.stdout.splitlines()[-1]
    assert "is left out" in done.stderr


@pytest.mark.overlay
@pytest.mark.parametrize("release", ["0.33.1", "0.38.0"])
def test_every_bug_is_cured_on_other_releases(release: str) -> None:
    done = python(*COMMAND, "--json", diffusers=release)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["environment"]["diffusers"] == release


def test_running_a_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text("""
import sys
import beside
import diffusers_offload_fix._startup as startup
assert __name__ == "__main__" and startup.is_armed()
print(sys.argv, beside.VALUE, __file__)
sys.exit(3)
""")
    done = python(*COMMAND, "run", script, "--flag", "value")
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == f"{[str(script), '--flag', 'value']} 7 {script}"


def test_running_a_module() -> None:
    done = python(*COMMAND, "run", "-m", "json.tool", "--help")
    assert done.returncode == 0 and "usage" in done.stdout


def test_running_nothing_is_a_usage_error() -> None:
    done = python(*COMMAND, "run")
    assert done.returncode == 2 and "run [-m MODULE | SCRIPT]" in done.stderr


def test_subcommands_are_handed_over(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("a_check")
    module.main = lambda argv: len(argv)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_check", module)
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(__main__, "MODULES", {"check": "a_check", "bench": "no_such_module"})
    assert __main__.main(["check", "a", "b"]) == 2
    assert __main__.main(["bench"]) == 2
    assert "not part of this release" in capsys.readouterr().err


def test_diffusers_that_is_missing_is_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, diffusers=None)
    monkeypatch.setattr(status, "target", lambda: None)
    rows = status.statuses(None, (), diffusers_offload_fix.fixes.all_fixes())
    assert {(row.state, row.detail) for row in rows} == {(State.WAITING, "diffusers is not installed")}


def test_diffusers_that_is_too_old_is_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, diffusers="0.32.2")
    verdict = status.gate(None)
    assert verdict == (State.OUT_OF_RANGE, "needs diffusers>=0.33, 0.32.2 is installed")


def test_a_target_that_has_lost_a_class_has_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, diffusers="0.99.0")
    module = types.ModuleType("a_target")
    module.ModuleGroup = module.GroupOffloadingHook = module.apply_group_offloading = object  # type: ignore[attr-defined]
    assert status.gate(module) == (State.DRIFTED, "diffusers 0.99.0 has no LazyPrefetchGroupOffloadingHook")


def test_an_unknown_release_is_decided_by_the_live_code() -> None:
    run("""
    import diffusers
    diffusers.__version__ = "0.99.0"
    import diffusers_offload_fix
    lines = Lines().lines
    module = target()
    assert is_applied() and not lines, lines
    diffusers_offload_fix.deactivate()

    # One that has lost a parameter of a patched method is left alone, with one warning.
    original = module.ModuleGroup.__init__
    def __init__(self, modules, somewhere, stream=None): ...
    exec(compile("def __init__(self, modules, somewhere, stream=None): ...", module.__file__, "exec"), vars(module))
    module.ModuleGroup.__init__ = vars(module).pop("__init__")
    diffusers_offload_fix.activate()
    assert "drifted" in states() and "applied" not in states()
    [line] = lines
    assert "not as expected: ModuleGroup.__init__" in line
    assert raw(module)["ModuleGroup.onload_"].__module__ == TARGET
    module.ModuleGroup.__init__ = original

    # One in which no probe finds anything any more is left as it is.
    from diffusers_offload_fix import fixes
    for name in [fix.name for fix in fixes.all_fixes()]:
        fix = importlib.import_module(f"diffusers_offload_fix.fixes.{name}").FIX
        fix.probe.upstream = lambda module: False
    diffusers_offload_fix.activate()
    assert states() == {"fixed_upstream", "out_of_range"}, states()
    assert raw(module)["ModuleGroup.onload_"].__module__ == TARGET
    """)


def test_a_cure_that_cannot_be_installed_has_failed_and_is_undone() -> None:
    run("""
    import dataclasses
    module = target()
    before = raw(module)
    import diffusers_offload_fix.methods as methods
    diffusers_offload_fix = sys.modules["diffusers_offload_fix"]
    diffusers_offload_fix.deactivate()
    before = raw(module)

    def broken(original):
        raise KeyError("broken on purpose")

    methods.PATCHES = (*methods.PATCHES[:-1], dataclasses.replace(methods.PATCHES[-1], make=broken))
    lines = Lines().lines
    diffusers_offload_fix.activate()
    assert "failed" in states() and "applied" not in states()
    [line] = lines
    assert "broken on purpose" in line and "cure 'mover' is not installed" in line
    after = raw(module)
    assert all(after[path] is before[path] for path in before)
    """)


def test_a_plugin_that_cannot_be_loaded_never_fails_the_import() -> None:
    run("""
    sys.modules["diffusers_offload_fix.methods"] = None
    import diffusers_offload_fix
    lines = Lines().lines
    target()
    [line] = lines
    assert line.startswith("diffusers is left unpatched: ModuleNotFoundError"), line
    assert "failed" in states() and "applied" not in states()
    """)


def test_an_old_torchao_is_said_so() -> None:
    run("""
    from diffusers_offload_fix import versions
    real = versions.installed
    versions.installed = lambda name: "0.6.1" if name == "torchao" else real(name)
    lines = Lines().lines
    target()
    [line] = lines
    assert line.startswith("torchao 0.6.1 is older than what this plugin knows (needs torchao>=0.7)")
    assert is_applied()
    """)
