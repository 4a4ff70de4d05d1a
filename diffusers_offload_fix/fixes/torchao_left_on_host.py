"""Q10: before diffusers 0.38 the data of a torchao weight never reaches the device.

As Q1: `param.data = …` moves only the outer tensor. From 0.38 upstream moves torchao's weights in another way.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    weight = stage.onloaded(TorchAO.on("cpu", stage.log))
    return bool(weight.leaf.device != DEVICE)


FIX = Fix(
    name="torchao_left_on_host",
    id="Q10",
    issues=("huggingface/diffusers#13276",),
    summary="torchao: device mismatch in every mode",
    versions=">=0.33,<0.38",
    cure="mover",
    probe=probe,
)
