"""`python -m diffusers_offload_fix`: the account, and the subcommands `run`, `check` and `bench`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import runpy
import sys

from diffusers_offload_fix import _startup

USAGE = """\
python -m diffusers_offload_fix [--json]
           versions, and the state of every upstream bug
       python -m diffusers_offload_fix run [-m MODULE | SCRIPT] ARGS
           run an unmodified program with the plugin on
       python -m diffusers_offload_fix check [ARGS]
           run a tiny pipeline unpatched and patched
"""
# Subcommands that live in a module of their own.
MODULES = {"check": "diffusers_offload_fix.check", "bench": "diffusers_offload_fix.bench"}


def main(argv: list[str]) -> int:
    """Run one subcommand. Returns the exit status: 0 when every bug that is present is cured."""
    if argv and argv[0] == "run":
        return run(argv[1:])
    if argv and argv[0] in MODULES:
        return delegate(argv[0], argv[1:])
    return account(argv)


def account(argv: list[str]) -> int:
    """Print the account of the installed versions."""
    parser = argparse.ArgumentParser(prog="python -m diffusers_offload_fix", usage=USAGE)
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
    _load_target()
    from diffusers_offload_fix import account as words
    from diffusers_offload_fix import versions

    text = json.dumps(words.as_dict(), indent=2) if options.json else words.as_text()
    sys.stdout.write(text + "\n")
    absent = versions.installed("diffusers") is None
    return 0 if absent or all(row.is_good for row in words.report()) else 1


def run(argv: list[str]) -> int:
    """Run a script, or a module with -m, as `python` itself would, with the plugin on."""
    as_module = argv[:1] == ["-m"]
    rest = argv[1:] if as_module else argv
    if not rest:
        sys.stderr.write(f"usage: {USAGE}")
        return 2
    sys.argv = rest
    if as_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = _folder(rest[0])
        runpy.run_path(rest[0], run_name="__main__")
    return 0


def delegate(name: str, argv: list[str]) -> int:
    """Hand over to the module of a subcommand."""
    if importlib.util.find_spec(MODULES[name]) is None:
        sys.stderr.write(f"{name!r} is not part of this release\n")
        return 2
    return int(importlib.import_module(MODULES[name]).main(argv) or 0)


def _load_target() -> None:
    """Import the targets if they are there; a diffusers that is missing or cannot be imported is the report's to show."""
    for name in (_startup.TARGET, *_startup.OTHERS):
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:
            logging.getLogger("diffusers_offload_fix").debug("cannot import %s: %s", name, error)


def _folder(script: str) -> str:
    import os

    return os.path.dirname(os.path.realpath(script))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
