"""R1: without streams, an offload copies the unchanged weights back from the device.

That takes new host memory and a device-to-host copy a step, where the host copy could be handed back. The memory of
pinned copies, the other part of the report, is measured and not probed.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    stage.round_trip(Weight.on("cpu", stage.log))
    return HOST in stage.log.copies


FIX = Fix(
    name="offload_copies_back",
    id="R1",
    issues=("huggingface/diffusers#11106",),
    summary="an offload copies unchanged weights back from the device, into new host memory",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
