"""The setting in which cells of the matrix run on a real GPU, and a way to tell whether the GPU still answers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tests.cells import Mode, Setting

#: Each variant that is compared, and what switches the plugin on or off for it.
VARIANTS = {"unpatched": "0", "patched": "1"}


def enable(model: nn.Module, device: torch.device, mode: Mode, **more: Any) -> None:
    """`apply_group_offloading` as a user calls it."""
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(model, onload_device=device, **{**mode.arguments, **more})


def _live_bytes(device: torch.device) -> int:
    module = torch.get_device_module(device.type)
    module.synchronize(device)
    return int(module.memory_allocated(device))


def _pinned_bytes() -> int:
    from diffusers_offload_fix import backend

    return backend.pinned_bytes()


def setting(name: str = "cuda") -> Setting:
    """Cells on the named device: "cuda", "cuda:1", "xpu", or "npu" for the simulated one."""
    if name.startswith("npu"):
        from tests import sim, simulated

        sim.load()
        return simulated.setting(torch.device(name).index or 0)
    device = torch.device(name)
    device = torch.device(device.type, device.index or 0)
    return Setting(device=device, enable=enable, live_bytes=lambda: _live_bytes(device), pinned_bytes=_pinned_bytes)


def require(name: str) -> None:
    """Ends the program with status 2, and says why, where cells cannot run on the named device."""
    why = missing(name)
    if why is not None:
        sys.stdout.write(f"{why}\n")
        sys.exit(2)


def missing(name: str) -> str | None:
    """Why cells cannot run on the named device, or None."""
    if name.startswith("npu"):
        return None
    device = torch.device(name)
    module = getattr(torch, device.type, None)
    if module is None or not module.is_available():
        return f"no {device.type} device is available to torch {torch.__version__}"
    if (device.index or 0) >= module.device_count():
        return f"there are {module.device_count()} {device.type} devices, so no {name}"
    return None


def broken(device: torch.device) -> str | None:
    """The error that the device gives to everything from now on (an illegal access, an assertion), or None."""
    try:
        torch.ones(2, device=device).sum().item()
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def describe(device: torch.device) -> dict[str, str]:
    """The hardware and the releases that a result belongs to."""
    from diffusers_offload_fix import versions

    names = ("diffusers", "torchao", "optimum-quanto", "bitsandbytes", "gguf", "transformers", "accelerate")
    found = {name: str(versions.installed(name) or "absent") for name in names}
    gpu = torch.get_device_module(device.type).get_device_name(device)
    return {"device": gpu, "torch": torch.__version__, **found}
