"""G11: parameters at the root of a model are copied asynchronously and used at once, in the first forward.

The root's group is not among those that upstream makes blocking for the first pass. The probe looks at the order of
copy, wait and use; the wrong numbers themselves show on the simulator.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    root = stage.block(Weight.on("cpu", stage.log), name="root")
    return any(use.is_raced for use in stage.play(root, offload_type="leaf_level"))


FIX = Fix(
    name="root_not_waited_for",
    id="G11",
    issues=("huggingface/diffusers#13502",),
    summary="root-level parameters are used before their copy has ended (race)",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
