"""torch.compile over offloaded models: no more graph breaks and recompilations than upstream's own, and the same output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import cells, simulated
from tests.composed import models
from tests.gpu import compile as compiling


def test_compiled_models_break_and_recompile_no_more_than_unpatched() -> None:
    results = compiling.measure("npu", ",".join(compiling.KINDS), "eager,aot_eager")
    assert len(results["patched"]) == 8
    assert compiling.faults(results) == [], compiling.table(results)


@pytest.mark.parametrize(
    ("weights", "how", "order"), [("torchao-int8", "whole", "compile offload"), ("plain", "blocks", "offload compile")]
)
def test_a_compiled_model_takes_another_adapter(weights: str, how: str, order: str, npu: torch.device) -> None:
    pytest.importorskip("peft")
    torch._dynamo.reset()
    nets = [models.flux(weights, blocks=1) for _ in range(2)]
    nets[0].to(npu)
    for net in nets:
        net.enable_lora_hotswap(target_rank=4)
        net.load_lora_adapter(models.lora(net, 1), adapter_name="a", prefix="transformer")
    for what in order.split():
        if what == "offload":
            simulated.enable(nets[1], npu, cells.MODES["block+stream"])
        for net in nets if what == "compile" else ():
            net.compile(backend="eager") if how == "whole" else net.compile_repeated_blocks(backend="eager")
    first = compared(nets, npu)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for net in nets:
        net.load_lora_adapter(models.lora(net, 2, rank=2), adapter_name="a", hotswap=True, prefix="transformer")
    assert not torch.equal(compared(nets, npu), first)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def compared(nets: list[Any], device: torch.device) -> torch.Tensor:
    """The resident model's output, which is the offloaded one's in each of two forwards."""
    with torch.no_grad():
        for _ in range(2):
            wanted, got = (net(**models.flux_inputs(device), return_dict=False)[0] for net in nets)
            assert torch.equal(got, wanted)
    output: torch.Tensor = wanted
    return output
