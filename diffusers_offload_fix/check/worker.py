"""The half of `check` that runs cases, in a process of its own: `python -m diffusers_offload_fix.check.worker REQUEST`.

Whether the plugin is on there, DIFFUSERS_OFFLOAD_FIX says. Every message is one line of JSON on stdout after MARK.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import warnings
from typing import Any

from diffusers_offload_fix.check.cases import MODES, WEIGHTS, on_disk, streamed

MARK = "@check "
PRELUDE = "DIFFUSERS_OFFLOAD_FIX_CHECK_PRELUDE"
PASSES = 3


def main(argv: list[str]) -> int:
    """Runs the cases of the request in order, and reports each."""
    request = json.loads(argv[0])
    _prelude()
    warnings.simplefilter("ignore")
    worker = Worker(request.get("device"), request.get("folder"))
    _say("hello", **worker.describe())
    for weights, mode in request["cases"]:
        _say("done", weights=weights, mode=mode, **worker.run(weights, mode))
        if not worker.is_sound():
            return 3
    return 0


def _prelude() -> None:
    name = os.environ.get(PRELUDE)
    if name:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()


def _say(what: str, **fields: Any) -> None:
    sys.stdout.write("\n" + MARK + json.dumps({"what": what, **fields}) + "\n")
    sys.stdout.flush()


class Worker:
    """Runs cases on one device; a resident pipeline of each kind of weights gives the outputs to compare with."""

    def __init__(self, device: str | None, folder: str | None = None) -> None:
        import torch

        from diffusers_offload_fix import backend
        from diffusers_offload_fix.check import pipeline

        pipeline.hush()
        self.torch, self.backend, self.pipeline = torch, backend, pipeline
        self.device = backend.resolve(device or _default_device(torch))
        self.accelerated = self.device.type != "cpu"
        self._wanted: dict[str, list[Any]] = {}
        self._folder = folder

    def describe(self) -> dict[str, Any]:
        """The device, and what keeps the plugin from being applied."""
        from diffusers_offload_fix.account import device, report

        importlib.import_module("diffusers.hooks.group_offloading")
        with contextlib.suppress(Exception):  # what keeps it from being imported, each case says
            getattr(importlib.import_module("diffusers"), "FluxPipeline")  # noqa: B009 - it is loaded when asked for
        bad = [f"{row.id} {row.state.value}: {row.detail}" for row in report() if not row.is_good]
        return {
            "device": str(self.device),
            "accelerator": device() if self.accelerated else None,
            "streams": self.backend.has_streams(self.device),
            "not_applied": bad,
        }

    def run(self, weights: str, mode: str) -> dict[str, Any]:
        """One case: its state ("ran", "error" or "skipped") and what was measured."""
        reason = self._obstacle(weights, mode)
        if reason is not None:
            return {"state": "skipped", "detail": reason}
        start = time.perf_counter()
        try:
            wanted = self._resident(weights)
        except Exception as error:
            return {"state": "skipped", "detail": f"does not run resident: {_brief(error)}"}
        with tempfile.TemporaryDirectory(prefix="offload-check-", dir=self._folder) as folder:
            found = self._offloaded(weights, mode, wanted, folder)
        return {**found, "seconds": round(time.perf_counter() - start, 3)}

    def _obstacle(self, weights: str, mode: str) -> str | None:
        needed = WEIGHTS[weights]
        if needed is not None:
            try:
                importlib.import_module(needed)
            except ModuleNotFoundError:
                return "not installed"
            except Exception as error:  # a library may fail in any way while it loads
                return f"import {needed}: {_brief(error)}"
        if streamed(mode) and not self.backend.has_streams(self.device):
            return "needs an accelerator with streams"
        return None

    def _resident(self, weights: str) -> list[Any]:
        if weights not in self._wanted:
            pipe = self._build(weights)
            pipe.transformer.to(self.device)
            self._wanted[weights] = [self.pipeline.call(pipe, self.device, seed) for seed in range(PASSES)]
        return self._wanted[weights]

    def _build(self, weights: str) -> Any:
        pipe = self.pipeline.build(weights)
        pipe.vae.to(self.device)
        return pipe

    def _offloaded(self, weights: str, mode: str, wanted: list[Any], folder: str) -> dict[str, Any]:
        pipe = self._build(weights)
        gc.collect()
        live, pinned = self.live_bytes(), self.pinned_bytes()
        found: dict[str, Any] = {"state": "ran", "equal": True, "passes": 0}
        try:
            disk = {"offload_to_disk_path": folder} if on_disk(mode) else {}
            pipe.transformer.enable_group_offload(self.device, **MODES[mode], **disk)
            for seed, image in enumerate(wanted):
                got = self.pipeline.call(pipe, self.device, seed)
                found["equal"] = bool(found["equal"] and self.torch.equal(got, image))
                found["passes"] += 1
        except Exception as error:
            found.update(state="error", detail=_brief(error), equal=False)
        kept = pipe.transformer, pipe.vae
        del pipe  # its scheduler has a few numbers on the device
        gc.collect()
        if self.accelerated:
            with contextlib.suppress(RuntimeError):
                found["left"] = max(0, self.live_bytes() - live)
                found["pinned"] = max(0, self.pinned_bytes() - pinned)
        del kept
        return found

    def live_bytes(self) -> int:
        """Bytes of device memory in use, once everything that is queued has run."""
        if not self.accelerated:
            return 0
        module = self.backend.module(self.device)
        module.synchronize(self.device)
        return int(module.memory_allocated(self.device))

    def pinned_bytes(self) -> int:
        """Bytes of host memory that are pinned: torch's, and what the plugin registers itself."""
        registered = self.backend.pinned_bytes() if self.device.type in self.backend.REGISTRARS else 0
        read = getattr(self.backend.module(self.device), "host_memory_stats", None)
        stats = read() if self.accelerated and read is not None else {}
        return registered + int(stats.get("active_bytes.current", stats.get("allocated_bytes.current", 0)))

    def is_sound(self) -> bool:
        """False once the device has failed for good, as after an illegal access: then only a new process goes on."""
        try:
            return int(self.torch.ones(2, device=self.device).sum().item()) == 2
        except RuntimeError:
            return False


def _default_device(torch: Any) -> str:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return str(accelerator.current_accelerator().type)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
