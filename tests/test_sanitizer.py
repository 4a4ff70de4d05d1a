"""The sanitizer's exact watch, without a GPU: accesses by their bytes, and memory that is forgotten when it is freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu import sanitizer

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import torch
from tests.gpu.sanitizer import Watch
watch = Watch(lambda tensor: True)
watch.install()
handler, stream = watch.handler, 1
trace = watch.sanitizer.gpu_trace
room = torch.zeros(2048 + 256, dtype=torch.uint8)
slab = room[-room.data_ptr() % 256 :][:2048]
base = slab.data_ptr()
trace.MemoryAllocationCallbacks.fire_callbacks(base)
def access(tensor, write, stream):
    arguments = watch.sanitizer.ArgumentHandler()
    arguments._handle_argument(tensor, write, False)
    handler._handle_kernel_launch(stream, arguments.dataptrs_read, arguments.dataptrs_written, set(), "op", arguments.tensor_aliases)
access(slab[:1024], True, 1)
access(slab[1280:], False, 2)
assert watch.reports == [], "another slot"
access(slab[512:600], False, 2)
assert len(watch.reports) == 1, "a tensor inside the slab that is being copied"
trace.MemoryDeallocationCallbacks.fire_callbacks(base)
assert not any(base <= place < base + 2048 for place in handler.tensors_accessed.accesses)
access(slab, True, 3)
assert len(watch.reports) == 1, "memory of somebody else by now"
"""


def test_accesses_are_told_apart_by_their_bytes() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_tensor_covers_all_that_it_strides_over() -> None:
    whole = torch.zeros(4096, dtype=torch.uint8)
    start = whole.data_ptr() - whole.data_ptr() % sanitizer.GRAIN
    assert list(sanitizer.grains(whole[:1])) == [start]
    assert sanitizer.grains(whole)[0] == start and len(sanitizer.grains(whole)) in (16, 17)
    assert len(sanitizer.grains(whole.as_strided((2, 1), (1024, 1)))) in (4, 5)
