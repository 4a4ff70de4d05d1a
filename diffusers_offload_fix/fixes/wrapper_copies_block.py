"""Q12: upstream moves a wrapper through its own `.to(device, non_blocking=True)`, which most classes make blocking.

torchao drops `non_blocking` up to 0.17 (and for some classes in 0.18), so that streams overlap nothing. The probe
asks whether upstream leaves the copy to the class at all; that the leaves overlap is measured on a real device.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    stage.onloaded(TorchAO.on("cpu", stage.log), stream=True)
    return DEVICE in stage.log.copies


FIX = Fix(
    name="wrapper_copies_block",
    id="Q12",
    issues=("huggingface/diffusers#13276",),
    summary="torchao up to 0.17 ignores non_blocking: streams overlap nothing",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
