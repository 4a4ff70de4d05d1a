"""The child's half: builds the model, enables a mode, times forwards, compares with the resident output.

Started as `python -m diffusers_offload_fix.bench.work OPTIONS VARIANT FOLDER DEADLINE`; prints progress, and the result as JSON
on its last line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from diffusers_offload_fix import backend, versions

from . import build, host
from .drive import Drive
from .options import DISK_MODES, MODES, Options
from .parent import CASE, STEP
from .timeline import record


class Worker:
    """All cases of one variant."""

    def __init__(self, options: Options, variant: str, folder: Path, deadline: float) -> None:
        self.options, self.variant, self.folder, self.deadline = options, variant, folder, deadline
        self.device = backend.resolve(options.device)
        self.cases: dict[str, Any] = {}
        self.weights = 0

    def run(self) -> dict[str, Any]:
        """Measures the bus, then every case."""
        say(STEP, "measures the bus")
        bus = host.bus(self.device, self.options.bus_mib)
        host.release(self.device)
        for mode in ("resident",) if self.variant == "resident" else self.options.modes:
            if time.time() > self.deadline:
                self._keep_all(mode, {"error": "not run: the time limit was reached"})
                continue
            try:
                self._mode(mode)
            except Exception as error:
                traceback.print_exc()
                self._keep_all(mode, {"error": _brief(error)})
            host.release(self.device)
        head = {"variant": self.variant, "about": about(self.device), "bus": bus, "weights": self.weights}
        return {**head, "cases": self.cases}

    def _mode(self, mode: str) -> None:
        """One way of offloading, for every batch size."""
        with self._folder(mode) as folder:
            self._cases(mode, folder)

    @contextlib.contextmanager
    def _folder(self, mode: str) -> Iterator[Path | None]:
        """A folder of its own for a mode that needs one."""
        if mode not in DISK_MODES:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=self.options.folder) as folder:
            yield Path(folder)

    def _cases(self, mode: str, folder: Path | None) -> None:
        say(STEP, f"{mode}: builds the model")
        model = build.model(self.options, self.device)
        self.weights = build.weight_bytes(model)
        host.release(self.device)
        figures = self._enable(model, mode, folder)
        _compile(model, self.options.compile)
        for batch in self.options.batches:
            say(STEP, f"{mode}, batch {batch}")
            case = {**figures, **self._forwards(model, mode, batch, folder)}
            self._keep(f"{mode}/b{batch}", case)

    def _enable(self, model: Any, mode: str, folder: Path | None) -> dict[str, Any]:
        """Enables offloading (or moves the model), and says what that took."""
        pinned, start = host.pinned_bytes(self.device), time.perf_counter()
        with host.HostMemory() as memory:
            if mode == "resident":
                model.to(self.device)
            else:
                hooks = importlib.import_module("diffusers.hooks")
                disk = {} if folder is None else {"offload_to_disk_path": str(folder)}
                hooks.apply_group_offloading(model, onload_device=self.device, **MODES[mode], **disk)
            host.synchronize(self.device)
            seconds = time.perf_counter() - start
        return {
            "enable_s": seconds,
            "rss_growth": host.resident_set() - memory.before,
            # The weights are there before: a peak of 1.0 is nothing but them.
            "host_peak": (self.weights + memory.peak - memory.before) / max(self.weights, 1),
            "pinned": host.pinned_bytes(self.device) - pinned,
        }

    def _forwards(self, model: Any, mode: str, batch: int, folder: Path | None) -> dict[str, Any]:
        arguments = build.inputs(self.options, batch, self.device)
        base = host.allocated(self.device) if mode != "resident" else 0
        outputs = []
        found: dict[str, Any] = {}
        with torch.no_grad():
            first = time.perf_counter()
            for index in range(self.options.warmups):
                model(**arguments)
                if index == 0:
                    host.synchronize(self.device)
                    found["first_s"] = time.perf_counter() - first
            host.synchronize(self.device)
            host.reset_peak(self.device)

            def forward() -> float:
                start = time.perf_counter()
                outputs.append(model(**arguments)[0])
                host.synchronize(self.device)
                return 1000 * (time.perf_counter() - start)

            times = [forward() for _ in range(self.options.forwards)]
            found |= {"ms": statistics.median(times), "times": times, "device_peak": host.peak(self.device) - base}
            if folder is not None:
                found |= Drive(folder).rates(forward)
            if self.options.timeline and mode != "resident":
                found["timeline"] = record(lambda: model(**arguments), self.device)
        # Again after the forwards: staging buffers and copies that are made late are in it.
        found["pinned_after"] = host.pinned_bytes(self.device)
        found["equal"] = self._same(outputs, batch)
        return found

    def _same(self, outputs: list[torch.Tensor], batch: int) -> bool | None:
        """Whether every output is the resident model's, bit for bit; the resident variant writes it down."""
        file = self.folder / f"output-{batch}.pt"
        if self.variant == "resident":
            torch.save(outputs[0].cpu(), file)
        if not file.exists():
            return None
        wanted = torch.load(file, weights_only=True)
        return all(torch.equal(output.cpu(), wanted) for output in outputs)

    def _keep(self, key: str, case: dict[str, Any]) -> None:
        self.cases[key] = case
        say(CASE, json.dumps({key: case}))

    def _keep_all(self, mode: str, case: dict[str, Any]) -> None:
        for batch in self.options.batches:
            if f"{mode}/b{batch}" not in self.cases:
                self._keep(f"{mode}/b{batch}", case)


def _compile(model: Any, how: str) -> None:
    if how == "model":
        model.compile()
    elif how == "blocks":
        model.compile_repeated_blocks()


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def about(device: torch.device) -> dict[str, str]:
    """The hardware and the releases that the figures belong to."""
    names = ("diffusers", "torchao", "optimum-quanto")
    found = {name: versions.installed(name) for name in names}
    return {
        "device": str(backend.module(device).get_device_name(device)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version for name, version in found.items() if version is not None},
    }


def say(prefix: str, text: str) -> None:
    sys.stdout.write(f"{prefix}{text}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """Runs one variant."""
    options = Options.loads(argv[0])
    if options.plugin:
        importlib.import_module(options.plugin)
    worker = Worker(options, argv[1], Path(argv[2]), float(argv[3]))
    say("", json.dumps(worker.run()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
