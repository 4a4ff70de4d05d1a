"""The orders of importing, activating and deactivating, each in a fresh interpreter."""

from __future__ import annotations

from pathlib import Path

from fresh import python, run


def test_the_plugin_first() -> None:
    run("""
    import diffusers_offload_fix
    import diffusers_offload_fix as again
    assert states() == {"waiting"} and "diffusers" not in sys.modules
    module = target()
    assert is_applied()
    loader = module.__spec__.loader
    assert type(loader).__name__ == "SourceFileLoader" and module.__loader__ is loader

    applied = raw(module)
    diffusers_offload_fix.activate()
    assert raw(module) == applied

    diffusers_offload_fix.deactivate()
    originals = raw(module)
    assert all(entry is None or entry.__module__.startswith("diffusers.hooks.") for entry in originals.values())
    assert originals["GroupOffloadingHook.new_forward"] is None
    assert "inactive" in states() and "applied" not in states()

    # A reload makes new classes: they are patched while the plugin is on, and left alone while it is off.
    old = module.ModuleGroup
    diffusers_offload_fix.activate()
    importlib.reload(module)
    assert module.ModuleGroup is not old and is_applied()
    diffusers_offload_fix.deactivate()
    assert raw(module)["ModuleGroup.onload_"].__module__ == TARGET
    assert vars(old)["onload_"] is originals["ModuleGroup.onload_"]
    importlib.reload(module)
    assert "inactive" in states() and "applied" not in states()
    diffusers_offload_fix.activate()
    assert is_applied()
    """)


def test_the_target_first() -> None:
    run("""
    module = target()
    classes = [module.ModuleGroup, module.GroupOffloadingHook, module.LazyPrefetchGroupOffloadingHook]
    before = [dict(vars(cls)) for cls in classes]
    same = lambda: all(vars(cls)[name] is entry for cls, entries in zip(classes, before)
                       for name, entry in entries.items() if name not in ("__dict__", "__weakref__"))
    import diffusers_offload_fix
    assert is_applied() and not same()
    for _ in range(2):
        diffusers_offload_fix.deactivate()
        diffusers_offload_fix.deactivate()
        assert same() and [set(vars(cls)) for cls in classes] == [set(entries) for entries in before]
        diffusers_offload_fix.activate()
        diffusers_offload_fix.activate()
        assert is_applied()
    """)


def test_several_threads_at_once() -> None:
    run("""
    import threading
    gate, errors = threading.Barrier(8), []

    def guarded(work):
        gate.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    def plugin():
        import diffusers_offload_fix
        diffusers_offload_fix.activate()

    def both():
        plugin()
        target()

    threads = [threading.Thread(target=guarded, args=(work,)) for work in [plugin, target, both, target] * 2]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors, errors
    assert is_applied()
    from diffusers_offload_fix.patcher import chain, _records
    installed = {id(record.installed) for record in _records.values()}
    for path, entry in raw(target()).items():
        assert sum(id(link) in installed for link in chain(entry)) == 1, path
    import diffusers_offload_fix
    diffusers_offload_fix.deactivate()
    assert raw(target())["ModuleGroup.onload_"].__module__ == TARGET
    """)


def test_a_failed_import_of_the_target() -> None:
    run("""
    import diffusers_offload_fix

    class Broken:
        is_on = True
        def find_spec(self, name, path=None, target=None):
            if name == TARGET and self.is_on:
                return importlib.util.spec_from_loader(name, self)
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            raise ImportError("broken on purpose")

    import importlib.util
    broken = Broken()
    sys.meta_path.insert(1, broken)
    try:
        importlib.import_module("diffusers.hooks")
    except Exception as error:
        assert "broken on purpose" in str(error), error
    else:
        raise AssertionError("the import was to fail")
    assert TARGET not in sys.modules and states() == {"waiting"}
    broken.is_on = False
    target()
    assert is_applied()
    """)


def test_spawned_workers(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("""
import multiprocessing
import diffusers_offload_fix

def work(_):
    import diffusers.hooks.group_offloading
    return sorted({status.state.value for status in diffusers_offload_fix.report()})

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [0])[0])
""")
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['applied', 'fixed_upstream', 'out_of_range', 'waiting']"


def test_switched_off() -> None:
    run(
        """
    import diffusers_offload_fix
    assert not any(type(finder).__name__ == "TargetFinder" for finder in sys.meta_path)
    lines = Lines().lines
    diffusers_offload_fix.activate()
    assert lines == ["not activated: DIFFUSERS_OFFLOAD_FIX=0"]
    module = target()
    assert "inactive" in states() and "applied" not in states()
    assert all(entry is None or entry.__module__.startswith("diffusers.hooks.") for entry in raw(module).values())
    """,
        DIFFUSERS_OFFLOAD_FIX="0",
    )


def test_an_invalid_mode() -> None:
    run(
        """
    import diffusers_offload_fix
    lines = Lines().lines
    target()
    assert is_applied()
    assert lines == ["DIFFUSERS_OFFLOAD_FIX='on' is not valid: use one of 0, 1, strict"]
    try:
        diffusers_offload_fix.activate()
    except ValueError as error:
        assert str(error) == lines[0]
    else:
        raise AssertionError
    """,
        DIFFUSERS_OFFLOAD_FIX="on",
    )


def test_skipping() -> None:
    run(
        """
    import os
    import diffusers_offload_fix
    lines = Lines().lines
    target()
    assert "skipped" in states() and "applied" not in states()
    [line] = lines
    assert "DIFFUSERS_OFFLOAD_FIX_SKIP names quanto_left_on_host" in line and "Q1" in line and "Q2" in line

    # Asked anew, so that a change takes effect: by the name of the cure, not at all, by a name that is unknown.
    os.environ["DIFFUSERS_OFFLOAD_FIX_SKIP"] = "mover"
    diffusers_offload_fix.activate()
    assert "skipped" in states() and "applied" not in states()
    os.environ["DIFFUSERS_OFFLOAD_FIX_SKIP"] = ""
    diffusers_offload_fix.activate()
    assert is_applied()
    os.environ["DIFFUSERS_OFFLOAD_FIX_SKIP"] = "mover, nonsense"
    try:
        diffusers_offload_fix.activate()
    except ValueError as error:
        assert "nonsense" in str(error) and "torchao_low_cpu_alias" in str(error) and "mover" in str(error)
    else:
        raise AssertionError
    """,
        DIFFUSERS_OFFLOAD_FIX_SKIP="quanto_left_on_host",
    )


def test_an_unknown_name_to_skip_is_one_warning() -> None:
    run(
        """
    import diffusers_offload_fix
    lines = Lines().lines
    target()
    assert is_applied()
    [line] = lines
    assert line.startswith("DIFFUSERS_OFFLOAD_FIX_SKIP names nonsense; the valid names are: ")
    """,
        DIFFUSERS_OFFLOAD_FIX_SKIP="nonsense",
    )


def test_what_cannot_be_patched_is_an_error_in_strict_mode_only() -> None:
    code = """
    import os
    module = target()
    upstream = module.ModuleGroup.onload_
    module.ModuleGroup.onload_ = lambda self: None  # somebody else's patch
    others = raw(module)["ModuleGroup.onload_"] if False else vars(module.ModuleGroup)["onload_"]
    import diffusers_offload_fix.activation as activation
    lines = Lines().lines
    activation.target_loaded(module)
    [line] = lines
    assert "already patched by somebody else: ModuleGroup.onload_" in line
    assert vars(module.ModuleGroup)["onload_"] is others and "conflict" in states()

    os.environ["DIFFUSERS_OFFLOAD_FIX"] = "strict"
    for door in (activation.activate, lambda: activation.target_loaded(module)):
        try:
            door()
        except RuntimeError as error:
            assert "already patched" in str(error)
        else:
            raise AssertionError
    module.ModuleGroup.onload_ = upstream
    activation.activate()
    assert is_applied()

    # Somebody overwrites the plugin's function: their function stays when the plugin goes.
    module.ModuleGroup.onload_ = others
    assert "displaced" in states() and "applied" not in states()
    activation.deactivate()
    assert vars(module.ModuleGroup)["onload_"] is others
    assert "left alone" in lines[-1] and "ModuleGroup.onload_" in lines[-1]
    """
    run(code)


def test_the_import_of_diffusers_fails_in_strict_mode() -> None:
    run(
        """
    import diffusers_offload_fix
    try:
        target()
    except Exception as error:
        assert "nonsense" in str(error), error
    else:
        raise AssertionError
    assert TARGET not in sys.modules
    """,
        DIFFUSERS_OFFLOAD_FIX="strict",
        DIFFUSERS_OFFLOAD_FIX_SKIP="nonsense",
    )
