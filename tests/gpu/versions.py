"""`python -m tests.gpu.versions`: the matrix on several releases, side by side in processes of their own, in one table.

DIR holds a folder for each release, `diffusers-0.42.1`, `torchao-0.17.0`, and `quanto` with optimum-quanto. A process
that dies is started again behind the row that killed it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .__main__ import add_filters
from .matrix import Result
from .table import counts, merged, say

ROOT = Path(__file__).resolve().parents[2]
#: How often a process that died is started again.
RESTARTS = 6
COMBOS = ("0.42.1/0.17.0", "0.42.1/0.18.0", "0.38.0/0.17.0", "0.37.1/0.15.0", "0.35.2/0.15.0", "0.33.1/0.15.0")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.versions", description=__doc__)
    add_filters(parser)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--diffusers-dir", type=Path, required=True, metavar="DIR", help="folder with the releases")
    parser.add_argument(
        "--combo", action="append", default=[], metavar="DIFFUSERS/TORCHAO", help=f"repeatable; else {' '.join(COMBOS)}"
    )
    parser.add_argument("--at-once", type=int, default=4, help="how many processes at once")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for JSON files and logs")
    return parser.parse_args(argv)


def search_path(folder: Path, combo: str) -> list[Path]:
    """What goes in front of `PYTHONPATH`: the project first, so that its `tests` are the ones that are found."""
    diffusers, _, torchao = combo.partition("/")
    wanted = [folder / f"diffusers-{diffusers}"]
    wanted += [folder / f"torchao-{torchao}"] if torchao else []
    absent = [str(path) for path in wanted if not path.is_dir()]
    if absent:
        raise SystemExit(f"missing: {', '.join(absent)}")
    return [ROOT, *wanted, *(path for path in [folder / "quanto"] if path.is_dir())]


class Combo:
    """One pair of releases, run to the end or until the time is over."""

    def __init__(self, combo: str, options: argparse.Namespace) -> None:
        self.combo, self.options = combo, options
        stem = combo.replace("/", "-")
        self.file, self.log = options.out / f"{stem}.json", options.out / f"{stem}.log"
        self.paths = search_path(options.diffusers_dir, combo)

    def run(self, deadline: float) -> Result:
        """Runs, goes on behind a row that killed the process, and returns what is known at the end."""
        self.file.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        for _ in range(1 + RESTARTS):
            left = deadline - time.monotonic()
            if left < 5:
                break
            status = self._once(left)
            result = self._result()
            lost = result.stopped is not None and "lost" in result.stopped
            if status == 2 or (result.current is None and not lost):
                break
            say(f"{self.combo}: died, status {status}, in {result.current or result.stopped}; starting again behind it")
        return self._result()

    def _once(self, left: float) -> int:
        options = self.options
        command = [sys.executable, "-m", "tests.gpu", "--json", str(self.file), "--resume"]
        command += ["--device", options.device, "--time-limit", str(left), "--kinds", options.kinds]
        command += ["--skip", options.skip, "--modes", options.modes, *(["--fast"] if options.fast else [])]
        paths = [*map(str, self.paths), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace"
            )
            killer = threading.Timer(left + 60, process.kill)
            killer.start()
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if " s  " in line:
                    say(f"{self.combo:14s} {line.rstrip()}")
            status = process.wait()
            killer.cancel()
        return status

    def _result(self) -> Result:
        if self.file.exists():
            return Result.load(self.file)
        tail = self.log.read_text().strip().splitlines()[-1:] if self.log.exists() else []
        return Result(stopped=f"no result: {' '.join(tail)[:300]}")


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    options.out, options.diffusers_dir = options.out.resolve(), options.diffusers_dir.resolve()
    deadline = time.monotonic() + options.time_limit
    combos = [Combo(combo, options) for combo in options.combo or COMBOS]
    with ThreadPoolExecutor(options.at_once) as pool:
        results = dict(zip([c.combo for c in combos], pool.map(lambda combo: combo.run(deadline), combos)))
    text = report(results)
    (options.out / "table.txt").write_text(text + "\n")
    say("\n" + text)
    return 0 if all(result.complete() and not result.failing() for result in results.values()) else 1


def report(results: dict[str, Result]) -> str:
    """The merged table, and one line for each pair of releases."""
    lines = []
    for combo, result in results.items():
        about = ", ".join(f"{name} {value}" for name, value in result.about.items())
        ended = f"\n    STOPPED: {result.stopped}" if result.stopped is not None else ""
        lines.append(f"{combo}: {counts(result)}\n    {about}{ended}")
    return "\n\n".join([merged(results), "\n".join(lines)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
