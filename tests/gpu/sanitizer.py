"""`python -m tests.gpu.sanitizer`: cells of the matrix under torch's CUDA sanitizer, which must not report anything.

The sanitizer (`torch.cuda._sanitizer`, what TORCH_CUDA_SANITIZER=1 switches on) sees every operation that passes the dispatcher on
the thread that switched it on, and every event, stream wait, synchronisation, allocation and deallocation. It looks an access up by
the tensor's `data_ptr()`, not by its storage: so slots of one arena do not get into each other's way, but a copy of a whole slab
counts as an access to the slab's first tensor alone. As it is, it would therefore miss nearly everything here. The child process
makes it exact:

- an access covers every 256 bytes of the tensor, which is how the plugin aligns what it packs;
- memory that is freed is forgotten as a whole, not only its first address, since the allocator may give it to anybody;
- an event whose `query()` said that it has happened orders like a wait for it: the plugin then leaves the wait out;
- the plugin's staging threads are watched too;
- operations on wrapper subclasses are passed on, so that their inner tensors are seen;
- `set_` writes which storage a tensor has, not the bytes of that storage.

Not seen: memory that is freed while another stream still uses it (`record_stream`), and kernels that bypass the dispatcher. First the
ordering is taken away in one cell: there it must report. Exit status: 0 when nothing else is reported, 1 when something is.
"""

from __future__ import annotations

import argparse
import bisect
import concurrent.futures
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from .table import align, end, say

ROOT = Path(__file__).resolve().parents[2]
GRAIN = 256
#: Plain, two libraries' wrappers, ties across groups, buffers that forward changes, and odd sizes.
KINDS = ("plain-bfloat16", "plain-tied-root", "plain-changing-buffers", "plain-odd-sizes", "torchao-int8wo", "quanto-qint8")
CONTROL = ("plain-bfloat16", "block+stream")


def grains(tensor: torch.Tensor) -> range:
    """The first addresses of all pieces that a strided tensor touches, from its first byte to its last."""
    start = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    return range(start - start % GRAIN, start + reach * tensor.element_size(), GRAIN)


class Watch:
    """The sanitizer, made exact.

    Attributes:
        reports: what it found, in words; an exception that it raises may be caught on the way.
    """

    def __init__(self, on_device: Any = lambda tensor: tensor.is_cuda) -> None:
        import torch.cuda._sanitizer as sanitizer

        self.sanitizer: Any = sanitizer
        self.reports: list[str] = []
        self._on_device = on_device
        self._lock = threading.RLock()
        self._bases: list[int] = []
        self._owned: dict[int, set[int]] = {}
        self.mode = sanitizer.cuda_sanitizer.dispatch
        self.handler = self.mode.event_handler

    def install(self) -> None:
        """Changes the sanitizer's classes, in this process."""
        self.sanitizer.ArgumentHandler._handle_argument = self._argument_method()
        self._watch_launches()
        self._watch_places()
        # Its own callbacks are bound already, and run before these.
        self.sanitizer.gpu_trace.register_callback_for_memory_allocation(self._allocated)
        self.sanitizer.gpu_trace.register_callback_for_memory_deallocation(self._freed)
        mode_class = type(self.mode)
        mode_class.__torch_dispatch__ = _passing_wrappers(mode_class.__torch_dispatch__, self)
        self._watch_queries()
        self._watch_threads()

    def _argument_method(self) -> Any:
        on_device = self._on_device

        def handle(
            self: Any, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
        ) -> None:
            if not isinstance(value, torch.Tensor) or not on_device(value) or not value.numel() or metadata_only:
                return
            for place in grains(value):
                (self.dataptrs_written if is_write else self.dataptrs_read).add(place)
                self.tensor_aliases.setdefault(place, [])
                if name is not None:
                    self.tensor_aliases[place].append(name)
                if is_output:
                    self.outputs.add(place)

        return handle

    def _watch_launches(self) -> None:
        original = type(self.handler)._handle_kernel_launch

        @functools.wraps(original)
        def launched(handler: Any, *arguments: Any) -> list[Any]:
            with self._lock:
                self.reports += [str(error) for error in original(handler, *arguments)[:1]]
            # Told of, not raised: the cell goes on, and nobody can swallow it.
            return []

        type(self.handler)._handle_kernel_launch = launched

    def _allocated(self, base: int) -> None:
        with self._lock:
            where = bisect.bisect_left(self._bases, base)
            if self._bases[where : where + 1] != [base]:
                self._bases.insert(where, base)
            if where and base in self._owned.get(self._bases[where - 1], ()):
                self._owned[self._bases[where - 1]].discard(base)
            self._owned.setdefault(base, set()).add(base)

    def _freed(self, base: int) -> None:
        with self._lock:
            where = bisect.bisect_left(self._bases, base)
            if self._bases[where : where + 1] == [base]:
                del self._bases[where]
            for place in self._owned.pop(base, ()):
                self.handler.tensors_accessed.accesses.pop(place, None)

    def _watch_places(self) -> None:
        """Notes to which allocation each address belongs that is met for the first time."""
        seen = type(self.handler.tensors_accessed)
        original = seen.create_tensor

        def create(accessed: Any, place: int, trace: Any) -> None:
            where = bisect.bisect_right(self._bases, place) - 1
            if where >= 0:
                self._owned.setdefault(self._bases[where], set()).add(place)
            original(accessed, place, trace)

        seen.create_tensor = create

    def _watch_queries(self) -> None:
        original = torch.cuda.Event.query

        def query(event: Any) -> bool:
            happened = original(event)
            if happened:
                with self._lock:
                    self.handler.syncs.all_streams_wait_for_event(event.cuda_event)
            return happened

        event_class: Any = torch.cuda.Event
        event_class.query = query

    def _watch_threads(self) -> None:
        original = concurrent.futures.ThreadPoolExecutor.submit
        mode_class, handler = type(self.mode), self.handler

        class Elsewhere(mode_class):  # type: ignore[misc, valid-type]
            """The same watch on another thread: a mode keeps what it found there in itself."""

            def __init__(self) -> None:
                self.event_handler = handler

        def submit(executor: Any, work: Any, *arguments: Any, **options: Any) -> Any:
            def watched(*given: Any, **more: Any) -> Any:
                with Elsewhere():
                    return work(*given, **more)

            return original(executor, watched, *arguments, **options)

        pool: Any = concurrent.futures.ThreadPoolExecutor
        pool.submit = submit


def _passing_wrappers(original: Any, watch: Watch) -> Any:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass(leaf) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            return NotImplemented
        if getattr(func, "overloadpacket", None) is torch.ops.aten.set_:
            return func(*args, **(kwargs or {}))
        return original(self, func, types, args, kwargs)

    return dispatch


def child(options: argparse.Namespace) -> None:
    """Runs the cells of one kind; the last line is JSON: the faults and the reports of each mode."""
    from tests import cells, stress
    from tests.kinds.catalogue import KINDS as catalogue

    from . import matrix, setting

    watch = Watch()
    watch.install()
    watch.sanitizer.enable_cuda_sanitizer()
    import diffusers.hooks  # noqa: F401

    import diffusers_offload_fix  # noqa: F401

    matrix.fast()
    kind, place = catalogue[options.child], setting.setting(options.device)
    found: dict[str, Any] = {"reason": kind.runs(place.device)}
    for name in options.modes.split(",") if found["reason"] is None else ():
        watch.reports.clear()
        try:
            with stress.unordered() if options.control else place.around():
                faults = cells.run(kind, cells.MODES[name], place)
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
        found[name] = {"faults": faults[:3], "reports": len(watch.reports), "first": (watch.reports or [""])[0]}
    watch.sanitizer.cuda_sanitizer.disable()
    say(json.dumps(found))
    end(0)


def run(kind: str, modes: list[str], options: argparse.Namespace, control: bool = False) -> dict[str, Any]:
    """What a child process found; `error` if it died."""
    command = [sys.executable, "-m", "tests.gpu.sanitizer", "--child", kind, "--modes", ",".join(modes), "--device", options.device]
    command += ["--control"] if control else []
    # Loading and quantising is not of interest: the child switches the sanitizer on by itself.
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_CUDA_SANITIZER"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=options.time_limit)
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {options.time_limit:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return {"error": f"ended with status {done.returncode}: {' '.join(done.stderr.split())[-300:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitizer", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--modes", default="", help="names of modes, with commas between them; all by default")
    parser.add_argument("--time-limit", type=float, default=150, help="seconds for each kind")
    parser.add_argument("--child", metavar="KIND", help=argparse.SUPPRESS)
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    from tests.cells import MODES

    from .setting import require

    require(options.device)
    if not options.device.startswith("cuda"):
        say("the sanitizer watches CUDA devices only")
        return 2
    if options.child:
        child(options)
    modes = [name for name in options.modes.split(",") if name] or list(MODES)
    control = run(CONTROL[0], [CONTROL[1]], options, control=True)
    seen = control.get(CONTROL[1], {}).get("reports", 0)
    say(f"without ordering: {seen} reports {control.get('error', '')}")
    bad, rows, texts = not seen, [], []
    for kind in options.kinds.split(","):
        found = run(kind, modes, options)
        if found.get("error") or found.get("reason"):
            bad = bad or bool(found.get("error"))
            rows.append((kind, "-", found.get("error") or f"not run: {found['reason']}"))
            continue
        reported = [name for name in modes if found[name]["reports"] or found[name]["faults"]]
        rows.append((kind, f"{len(modes) - len(reported)} of {len(modes)}", ", ".join(reported) or "nothing reported"))
        texts += [f"{kind} {name}: {found[name]['faults']} {found[name]['first'][:3000]}" for name in reported[:2]]
        bad = bad or bool(reported)
    say(align(rows, ("kind", "modes without a report", "")))
    say("\n".join(["", *texts]) if texts else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
