"""`python -m tests.gpu.cycles`: enable, run and remove 20 times; nothing may be kept, neither on the host nor on the device.

A model of about 1 GiB goes through the cycles in one process, plain and int8, streamed with and without `low_cpu_mem_usage`; then it
is enabled again without a removal, and let go of while it is offloaded. Exit status 1 when memory grows.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .table import align, say

MIB = 1 << 20
FIELDS = ("VmRSS", "VmLck", "VmPin")
WAYS: dict[str, dict[str, Any]] = {
    "block+stream": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    "leaf+stream+low": {"offload_type": "leaf_level", "use_stream": True, "low_cpu_mem_usage": True},
}
#: What libraries, kernels and caches may take for good.
ALLOWED_MIB = 48


class Wide(nn.Module):
    """Blocks of linears, as many bytes as asked for."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def memory(device: torch.device) -> dict[str, float]:
    """MiB of this process (resident, locked, pinned), pinned by the plugin, and in use on the device."""
    from diffusers_offload_fix import backend

    gc.collect()
    module = backend.module(device)
    module.synchronize(device)
    module.empty_cache()
    found = dict.fromkeys(FIELDS, 0.0)
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) / 1024
    return {**found, "pinned": backend.pinned_bytes() / MIB, "device": module.memory_allocated(device) / MIB}


def build(width: int, depth: int, quant: str, device: torch.device) -> Wide:
    """The model on the host; it is filled on the device, which is faster."""
    with torch.device(device):
        model = Wide(width, depth).to(torch.bfloat16).requires_grad_(False)
    if quant == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(version=2))
    return model.to("cpu")


def enable(model: nn.Module, device: torch.device, way: str) -> None:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(model, onload_device=device, **WAYS[way])


def remove(model: nn.Module) -> None:
    from diffusers.hooks import HookRegistry

    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        if isinstance(registry, HookRegistry):
            for name in ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"):
                registry.remove_hook(name, recurse=False)


def enable_anew(model: nn.Module, device: torch.device, way: str) -> None:
    """Enables a second time. Upstream puts the hooks of block level in the place of the old ones; those of leaf level it refuses."""
    if way.startswith("leaf"):
        remove(model)
    enable(model, device, way)


def settle(device: torch.device) -> None:
    """Waits until what a loop keeps for a moment is given back."""
    try:
        from diffusers_offload_fix import idle
    except ImportError:
        return
    idle.clear()


def cycles(quant: str, way: str, device: torch.device, times: int, width: int, depth: int) -> list[tuple[str, dict[str, float]]]:
    """Memory half-way, after the last cycle, after enabling again without removal, and after letting go of the model."""
    seen = []
    base = memory(device)
    model: Any = build(width, depth, quant, device)
    example = torch.randn(4, 16, width, device=device, dtype=torch.bfloat16)
    wanted = None
    for index in range(times):
        enable(model, device, way)
        wanted = _same(model, example, wanted)
        remove(model)
        settle(device)
        if index + 1 in (times // 2, times):
            seen.append((f"cycle {index + 1}", memory(device)))
    enable(model, device, way)
    _same(model, example, wanted)
    settle(device)
    seen.append(("enabled", memory(device)))
    enable_anew(model, device, way)
    _same(model, example, wanted)
    settle(device)
    seen.append(("enabled anew", memory(device)))
    del model, example, wanted
    settle(device)
    seen.append(("let go of", memory(device)))
    return [("before", base), *seen]


def _same(model: nn.Module, example: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    with torch.no_grad():
        got = [model(example) for _ in range(2)][-1].cpu()
    if wanted is not None and not torch.equal(got, wanted):
        raise RuntimeError("the output differs from that of the first cycle")
    return got


def faults(seen: list[tuple[str, dict[str, float]]], allowed: float) -> list[str]:
    """What grew in the second half of the cycles, and what is still there after the model is gone."""
    at = dict(seen)
    middle, last = (name for name, _ in seen if name.startswith("cycle"))
    pairs = [(middle, last, allowed), ("enabled", "enabled anew", allowed), ("before", "let go of", 2 * allowed)]
    found = []
    for before, after, more in pairs:
        for name, value in at[after].items():
            # Bytes that somebody counts must come back to the last one; the process's own figures are coarse.
            limit = 0.0 if name in ("pinned", "device") and (before, after) != ("enabled", "enabled anew") else more
            if before == "before" and name == "device":
                limit = 64.0  # a library's workspace
            if value - at[before][name] > limit:
                found.append(f"{name}: {at[before][name]:.0f} MiB {before}, {value:.0f} MiB {after}")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.cycles", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--allowed", type=float, default=ALLOWED_MIB, help="MiB that the process may grow by")
    options = parser.parse_args(argv)
    from .setting import require, setting

    require(options.device)
    place = setting(options.device)
    import diffusers.hooks  # noqa: F401

    import diffusers_offload_fix  # noqa: F401

    bad, rows = [], []
    with place.around():
        for quant in ("none", "int8"):
            for way in WAYS:
                # The libraries that this needs are loaded before anything is measured.
                cycles(quant, way, place.device, 2, 256, 1)
                seen = cycles(quant, way, place.device, options.times, options.width, options.depth)
                rows += [(quant, way, when, *(f"{value:.0f}" for value in found.values())) for when, found in seen]
                bad += [f"{quant} {way}: {fault}" for fault in faults(seen, options.allowed)]
    say(align(rows, ("weights", "mode", "when", *(f"{name} MiB" for name in (*FIELDS, "pinned", "device")))))
    say("\n".join(["", *bad]) if bad else "\nnothing is kept")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
