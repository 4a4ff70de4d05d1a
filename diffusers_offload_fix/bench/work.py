"""The child's half: builds the model, enables a mode, times forwards, compares with the resident output.

Started as `python -m diffusers_offload_fix.bench.work OPTIONS VARIANT QUANTS FOLDER DEADLINE [count]`; prints progress, and the result
as JSON on its last line.
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

from . import build, counts, host
from .drive import Drive
from .options import DISK_MODES, MODES, Options
from .parent import CASE, COUNT, HEAD, STEP
from .results import name
from .timeline import record

#: Forwards of longer than this many seconds are not repeated more often than SLOW_FORWARDS times.
SLOW, SLOW_WARMUPS, SLOW_FORWARDS = 1.0, 1, 5


class Worker:
    """All cases of one variant with some kinds of weights."""

    def __init__(self, options: Options, variant: str, quants: tuple[str, ...], folder: Path, deadline: float) -> None:
        self.options, self.variant, self.folder, self.deadline = options, variant, folder, deadline
        self.device = backend.resolve(options.device)
        self.wanted = [case for case in options.cases(variant) if case[0] in quants]
        self.cases: dict[str, Any] = {}
        self.weights: dict[str, int] = {}
        self.bus: dict[str, float] = {}
        self.base = 0

    def run(self) -> dict[str, Any]:
        """Measures the bus, then every case."""
        say(STEP, "measures the bus")
        self.bus = host.bus(self.device, self.options.bus_mib)
        host.release(self.device)
        for quant, mode in dict.fromkeys(case[:2] for case in self.wanted):
            batches = [batch for *what, batch in self.wanted if what == [quant, mode]]
            if time.time() > self.deadline:
                self._keep_all(quant, mode, batches, {"error": "not run: the time limit was reached"})
                continue
            try:
                self._mode(quant, mode, batches)
            except Exception as error:
                traceback.print_exc()
                self._keep_all(quant, mode, batches, {"error": _brief(error)})
            host.release(self.device)
        return {**self._head(), "cases": self.cases}

    def _head(self) -> dict[str, Any]:
        return {"variant": self.variant, "about": about(self.device), "bus": self.bus, "weights": self.weights}

    def _mode(self, quant: str, mode: str, batches: list[int]) -> None:
        """One way of offloading, for every batch size."""
        with self._folder(mode) as folder:
            self._cases(quant, mode, batches, folder)

    @contextlib.contextmanager
    def _folder(self, mode: str) -> Iterator[Path | None]:
        """A folder of its own for a mode that needs one."""
        if mode not in DISK_MODES:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="offload-bench-", dir=self.options.folder) as folder:
            yield Path(folder)

    def _cases(self, quant: str, mode: str, batches: list[int], folder: Path | None) -> None:
        say(STEP, f"{quant} {mode}: builds the model")
        model = build.model(self.options, quant, self.device)
        self.weights[quant] = build.weight_bytes(model)
        # Now: whoever is killed later has said it.
        say(HEAD, json.dumps(self._head()))
        host.release(self.device)
        # Inputs are in the device's figures; what earlier cases left behind is not.
        self.base = host.allocated(self.device)
        figures = self._enable(model, quant, mode, folder)
        _compile(model, self.options.compile)
        for batch in batches:
            say(STEP, f"{quant} {mode}, batch {batch}")
            case = {**figures, **self._forwards(model, quant, mode, batch, folder)}
            self._keep(name(quant, mode, batch), case)

    def _enable(self, model: Any, quant: str, mode: str, folder: Path | None) -> dict[str, Any]:
        """Enables offloading (or moves the model), and says what that took."""
        pinned, start = host.pinned_bytes(self.device), time.perf_counter()
        with host.HostMemory() as memory:
            self._offload(model, mode, folder)
            host.synchronize(self.device)
            seconds = time.perf_counter() - start
        weights = self.weights[quant]
        return {
            **counts.groups(model),
            "enable_s": seconds,
            "rss_growth": host.resident_set() - memory.before,
            # The weights are there before: a peak of 1.0 is nothing but them.
            "host_peak": (weights + memory.peak - memory.before) / max(weights, 1),
            "pinned": host.pinned_bytes(self.device) - pinned,
        }

    def _offload(self, model: Any, mode: str, folder: Path | None) -> None:
        if mode == "resident":
            model.to(self.device)
        else:
            hooks = importlib.import_module("diffusers.hooks")
            disk = {} if folder is None else {"offload_to_disk_path": str(folder)}
            hooks.apply_group_offloading(model, onload_device=self.device, **MODES[mode], **disk)

    def _forwards(self, model: Any, quant: str, mode: str, batch: int, folder: Path | None) -> dict[str, Any]:
        arguments = build.inputs(self.options, batch, self.device)
        with torch.no_grad(), build.denoising(self.options.forwards):
            found = self._timed(model, arguments)
            outputs = found.pop("outputs")
            if folder is not None:
                found |= Drive(folder).rates(lambda: self._time(model, arguments))
            if self.options.timeline and mode != "resident":
                found["timeline"] = record(lambda: model(**arguments), self.device)
        # Again after the forwards: staging buffers and copies that are made late are in it.
        found["pinned_after"] = host.pinned_bytes(self.device)
        given = sum(value.nbytes for value in arguments.values() if isinstance(value, torch.Tensor))
        found["between"] = host.allocated(self.device) - self.base - given
        found["equal"] = self._same(outputs, quant, batch)
        return found

    def _timed(self, model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Times of forwards in milliseconds, the device's peak, and the outputs."""
        first = self._time(model, arguments)[0]
        slow = first > SLOW and self.options.compile == "none"
        warmups, forwards = self.options.warmups, self.options.forwards
        if slow:
            warmups, forwards = min(warmups, SLOW_WARMUPS), min(forwards, SLOW_FORWARDS)
        for _ in range(warmups - 1):
            self._time(model, arguments)
        host.reset_peak(self.device)
        times, outputs = zip(*(self._time(model, arguments) for _ in range(forwards)))
        milliseconds = [1000 * seconds for seconds in times]
        figures = {"first_s": first, "ms": statistics.median(milliseconds), "times": milliseconds}
        return {**figures, "device_peak": host.peak(self.device) - self.base, "outputs": outputs}

    def _time(self, model: Any, arguments: dict[str, Any]) -> tuple[float, torch.Tensor]:
        host.synchronize(self.device)
        start = time.perf_counter()
        output = model(**arguments)[0]
        host.synchronize(self.device)
        # On the host, or the outputs would be in the peak.
        return time.perf_counter() - start, output.cpu()

    def _same(self, outputs: tuple[torch.Tensor, ...], quant: str, batch: int) -> bool | None:
        """Whether every output is the resident model's, bit for bit; the resident variant writes it down."""
        file = self.folder / f"output-{quant}-{batch}.pt"
        if self.variant == "resident":
            torch.save(outputs[0], file)
        if not file.exists():
            return None
        wanted = torch.load(file, weights_only=True)
        return all(torch.equal(output, wanted) for output in outputs)

    def _keep(self, key: str, case: dict[str, Any]) -> None:
        self.cases[key] = case
        say(CASE, json.dumps({key: case}))

    def _keep_all(self, quant: str, mode: str, batches: list[int], case: dict[str, Any]) -> None:
        for batch in batches:
            if name(quant, mode, batch) not in self.cases:
                self._keep(name(quant, mode, batch), case)


class Counter(Worker):
    """Counts what a forward makes the host and the driver do; times nothing."""

    def __init__(self, options: Options, variant: str, quants: tuple[str, ...], folder: Path, deadline: float) -> None:
        super().__init__(options, variant, quants, folder, deadline)
        self.wanted = [case for case in options.counted(variant) if case[0] in quants]

    def run(self) -> dict[str, Any]:
        """Counts every case; one that fails was reported by the process that times it."""
        for quant, mode, batch in self.wanted:
            with contextlib.suppress(Exception), self._folder(mode) as folder:
                self._count(quant, mode, batch, folder)
            host.release(self.device)
            if time.time() > self.deadline:
                break
        return {**self._head(), "cases": {}, "counts": self.cases}

    def _count(self, quant: str, mode: str, batch: int, folder: Path | None) -> None:
        say(STEP, f"{quant} {mode}: counts")
        model = build.model(self.options, quant, self.device)
        self._offload(model, mode, folder)
        arguments = build.inputs(self.options, batch, self.device)
        with torch.no_grad(), build.denoising(self.options.forwards):
            # The order of the groups is known after two forwards; a slow one is slow because of what it copies, and is not traced.
            if max(self._time(model, arguments)[0] for _ in range(2)) < SLOW:
                found = counts.of_forward(lambda: model(**arguments), self.device)
                self.cases[name(quant, mode, batch)] = found
                say(COUNT, json.dumps({name(quant, mode, batch): found}))


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
    found = {library: versions.installed(library) for library in names}
    return {
        "device": str(backend.module(device).get_device_name(device)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{library: version for library, version in found.items() if version is not None},
    }


def say(prefix: str, text: str) -> None:
    sys.stdout.write(f"{prefix}{text}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """Runs one variant."""
    options = Options.loads(argv[0])
    if options.plugin:
        importlib.import_module(options.plugin)
    kind = Counter if argv[5:] == ["count"] else Worker
    worker = kind(options, argv[1], tuple(argv[2].split(",")), Path(argv[3]), float(argv[4]))
    say("", json.dumps(worker.run()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
