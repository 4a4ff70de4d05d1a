"""G21: a layer that nobody prefetched is used on the host.

With streams each layer is loaded by the one that ran before it in the first forward. A layer that did not run then,
or runs in another order, is not loaded at all. Fixed upstream in 0.37 for plain weights.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    block = stage.block(Weight.on("cpu", stage.log))
    group = stage.group(block, stream=True, onload_self=False)
    stage.hook(group).pre_forward(block)
    return bool(block.weight0.device != DEVICE)


FIX = Fix(
    name="unprefetched_layer",
    id="G21",
    issues=("huggingface/diffusers#13211",),
    summary="layers that run conditionally are not loaded: device mismatch with streams",
    versions=">=0.33,<0.37",
    cure="mover",
    probe=probe,
)
