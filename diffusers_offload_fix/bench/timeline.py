"""When each group was copied and when it was computed with, from events on the streams themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffusers_offload_fix import backend, transfer

from . import host


def record(forward: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Spans of one forward, in milliseconds from its start; empty if nothing traces (the plugin is off, no streams)."""
    if not hasattr(transfer, "trace") or not backend.has_streams(device):
        return []
    seen: list[tuple[str, str, Any, Any]] = []
    host.synchronize(device)
    origin = backend.module(device).Event(enable_timing=True)
    origin.record(backend.Streams(device).current())
    holder: Any = transfer
    before, holder.trace = holder.trace, lambda *span: seen.append(span)
    try:
        forward()
    finally:
        holder.trace = before
    host.synchronize(device)
    return [_span(origin, *span) for span in seen]


def _span(origin: Any, kind: str, name: str, start: Any, end: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": str(name),
        "start": float(origin.elapsed_time(start)),
        "end": float(origin.elapsed_time(end)),
    }


def overlap(spans: list[dict[str, Any]]) -> float:
    """The share of copying time during which something computes, from 0 to 1."""
    computing = _union([(span["start"], span["end"]) for span in spans if span["kind"] == "compute"])
    copying = _union([(span["start"], span["end"]) for span in spans if span["kind"] == "copy"])
    total = sum(end - start for start, end in copying)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in copying)
    return both / total if total > 0 else 0.0


def _union(ranges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
