"""Unmodified diffusers on the simulated device: right where it is right, and its known races caught in the act."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

# A fresh interpreter, because other tests patch the diffusers of this one.
SCRIPT = textwrap.dedent("""
    import json, sys
    import torch
    from tests import sim

    sim.load()
    from diffusers.hooks import apply_group_offloading

    class Net(torch.nn.Module):
        def __init__(self, root):
            super().__init__()
            self.inp = None if root == "lists" else torch.nn.Linear(32, 32)
            self.scale = torch.nn.Parameter(torch.ones(32)) if root == "parameter" else 1.0
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            x = x * self.scale
            x = self.inp(x) if self.inp else x
            for block in self.blocks:
                x = block(x)
            return x

    def passes(root, **config):
        sim.reset()
        torch.manual_seed(0)
        net, x = Net(root).eval(), torch.randn(2, 32)
        with torch.no_grad(), sim.xpu_shim():
            expected = net(x)
            apply_group_offloading(net, onload_device=torch.device("npu"), **config)
            equal = [torch.equal(net(x.to("npu")).cpu(), expected) for _ in range(3)]
        return {"equal": equal, "hazards": sim.hazards()}

    print("RESULT" + json.dumps([passes(**case) for case in json.loads(sys.argv[1])]))
""")

BLOCK: dict[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
LEAF: dict[str, Any] = {"offload_type": "leaf_level"}


def run(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    results: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT"))
    return results


def test_plain_layers_are_right_and_races_are_seen() -> None:
    spec = importlib.util.find_spec("diffusers")
    version = re.search(r'__version__ = "0\.(\d+)', Path(spec.origin).read_text()) if spec and spec.origin else None
    if not version or not 36 <= int(version[1]) <= 42:
        pytest.skip("what upstream gets wrong is known for 0.36 to 0.42")
    streamed = {"use_stream": True}
    right = [{"root": "linear", **kind, **mode} for kind in (BLOCK, LEAF) for mode in ({}, streamed)]
    # The root has nothing of its own: nothing waits for the copies.
    no_hook = {"root": "lists", **BLOCK, **streamed}
    # A parameter of the root is used before its copy has run, in the first pass.
    root_parameter = {"root": "parameter", **LEAF, **streamed}
    *correct, unwaited, early = run(*right, no_hook, root_parameter)
    assert [case["equal"] for case in correct] == [[True] * 3] * 4
    assert [case["hazards"] for case in correct] == [[]] * 4
    assert unwaited["equal"] == [False] * 3
    assert early["equal"] == [False, True, True]
    assert all(case["hazards"][0].startswith("read after write") for case in (unwaited, early))
