"""Q5: hooks that are applied again before the first forward (a LoRA is loaded) make the host copy an alias.

The first offload has put the pinned copy into the weight, and `.cpu().pin_memory()` of a pinned weight is the weight
itself: then as Q2, even without `low_cpu_mem_usage`.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    block = stage.block(TorchAO.on("cpu", stage.log))
    stage.group(block, stream=True).offload_()
    again = stage.group(block, stream=True)
    again.onload_()
    again.offload_()
    return bool(block.weight0.leaf.device != HOST)


FIX = Fix(
    name="torchao_reapplied_alias",
    id="Q5",
    issues=(),
    summary="torchao: hooks applied again before the first forward leave the weights on the device",
    versions=">=0.38",
    cure="mover",
    probe=probe,
)
