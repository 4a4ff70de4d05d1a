"""Q15: the data of torchao's NF4Tensor never reach the device.

It is not a `TorchAOBaseTensor`, so upstream treats it as a plain tensor, as it does quanto's weights (Q1). The probe
restores with streams, where Q1's does not.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import Wrapper


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    weight = stage.onloaded(Wrapper.on("cpu", stage.log), stream=True)
    return bool(weight.leaf.device != DEVICE)


FIX = Fix(
    name="nf4_left_on_host",
    id="Q15",
    issues=(),
    summary="torchao NF4Tensor: device mismatch in every mode",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
