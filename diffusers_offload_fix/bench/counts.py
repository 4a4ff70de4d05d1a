"""What one forward makes the host and the driver do: copies to the device, waits of the host, allocations on the device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from diffusers_offload_fix import backend, tree
from diffusers_offload_fix.structure import unique
from diffusers_offload_fix.unhook import hooks_below

from . import host

#: Names under which a runtime's trace shows the host waiting for the device.
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
FORWARD = "counted forward"


def of_forward(forward: Callable[[], object], device: torch.device) -> dict[str, int | None]:
    """Figures of single forwards: `allocations`, `waits`, `copies`; None where the device does not tell.

    The same figures of the resident model have to be subtracted: kernels allocate too.
    """
    with waits_called(device) as called:
        allocations = _allocations(forward, device)
    traced = _traced(forward, device)
    seen = [number for number in (called.get("waits"), traced.get("waits")) if number is not None]
    return {"allocations": allocations, "waits": max(seen, default=None), "copies": traced.get("copies")}


def _allocations(forward: Callable[[], object], device: torch.device) -> int | None:
    before = _allocated_blocks(device)
    forward()
    after = _allocated_blocks(device)
    return None if before is None or after is None else after - before


def _allocated_blocks(device: torch.device) -> int | None:
    stats: Any = getattr(backend.module(device), "memory_stats", dict)
    stats = stats(device) if stats is not dict else {}
    for name in ("allocation.all.allocated", "num_device_alloc"):
        if name in stats:
            return int(stats[name])
    return None


@contextlib.contextmanager
def waits_called(device: torch.device) -> Iterator[dict[str, int | None]]:
    """Counts under `waits` how often Python asks the host to wait; None where the classes cannot be wrapped."""
    module, lock = backend.module(device), threading.Lock()
    found: dict[str, int | None] = {"waits": 0}

    def counting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with lock:
                found["waits"] = (found["waits"] or 0) + 1
            return inner(*arguments, **options)

        return call

    with contextlib.ExitStack() as undo:
        for holder in (module.Event, module.Stream, module):
            original = holder.__dict__.get("synchronize")
            try:
                setattr(holder, "synchronize", counting(getattr(holder, "synchronize")))  # noqa: B009, B010 -- any holder
            except TypeError:  # a class of C++
                found["waits"] = None
                break
            undo.callback(_restore, holder, original)
        yield found


def _restore(holder: Any, original: Any) -> None:
    if original is None:
        del holder.synchronize
    else:
        holder.synchronize = original


def _traced(forward: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Waits and copies that the runtime's own trace shows; empty where there is none."""
    profiling: Any = torch.profiler
    wanted = getattr(profiling.ProfilerActivity, device.type.upper(), None)
    if wanted is None or wanted not in profiling.supported_activities():
        return {}
    host.synchronize(device)
    with profiling.profile(activities=[profiling.ProfilerActivity.CPU, wanted]) as profiler:
        with profiling.record_function(FORWARD):
            forward()
        # Copies that are still on their way belong to the forward as well.
        host.synchronize(device)
    return tally(profiler.events())


def tally(events: Any) -> dict[str, int]:
    """Counts the waits in the forward's own span and every copy from host to device; empty if the device left no trace."""
    # The trace has the span twice: on the host, and from its first kernel to its last on the device.
    spans = [event.time_range for event in events if event.name == FORWARD and event.device_type.name == "CPU"]
    if not spans or all(event.device_type.name == "CPU" for event in events):
        return {}
    start, end = spans[0].start, spans[0].end
    waits = [e for e in events if e.name.endswith(WAITS) and start <= e.time_range.start <= end]
    copies = [e for e in events if e.name.startswith("Memcpy HtoD")]
    return {"waits": len(waits), "copies": len(copies)}


def groups(model: torch.nn.Module) -> dict[str, int]:
    """How many groups with tensors the offloaded model has, and the bytes of the largest."""
    found = unique(hook.group for hook in hooks_below(model))
    sizes = [size for group in found if (size := _bytes(group))]
    return {"groups": len(sizes), "largest_group": max(sizes, default=0)}


def _bytes(group: Any) -> int:
    tensors = {id(t): t for module in group.modules for t in [*module.parameters(), *module.buffers()]}
    tensors |= {id(t): t for t in [*group.parameters, *group.buffers]}
    return sum(leaf.numel() * leaf.element_size() for t in tensors.values() for leaf in tree.Tree(t).leaves)
