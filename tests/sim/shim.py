"""Makes older diffusers, which know only CUDA and XPU by name, take the simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _replacements(version: tuple[int, int], npu: Any) -> list[tuple[Any, str, Any]]:
    if version >= (0, 42):
        return []  # asks the device's own module
    if version >= (0, 34):
        return [(torch.xpu, "is_available", lambda: True)]  # then it takes torch.Stream() and torch.accelerator
    return [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "Stream", npu.Stream),
        (torch.cuda, "stream", npu.stream),
        (torch.cuda, "current_stream", npu.current_stream),
    ]


@contextlib.contextmanager
def xpu_shim() -> Iterator[None]:
    """diffusers before 0.42 accepts `use_stream=True` inside; before 0.34 the forward calls belong inside too."""
    import diffusers

    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(_release(diffusers.__version__), torch.get_device_module("npu")):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
