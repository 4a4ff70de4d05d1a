"""Q13: a quanto model that was on the device before group offloading was enabled stays there, with streams.

Upstream restores `param.data = host copy`, which leaves the wrapper's data where they were.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import Dequantising


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    block = stage.block(Dequantising.on(DEVICE, stage.log))
    stage.group(block, stream=True).offload_()
    return bool(block.weight0.leaf.device != HOST)


FIX = Fix(
    name="quanto_from_device",
    id="Q13",
    issues=(),
    summary="quanto model enabled while on the device: all of it stays there with streams",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
