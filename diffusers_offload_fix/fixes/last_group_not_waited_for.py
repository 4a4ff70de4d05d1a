"""G23: the last group that is prefetched is never waited for.

Upstream waits for a group only when it starts to load the next. The probe looks at the order of copy, wait and use
over two passes; the NaN show on the simulator. Fixed upstream in 0.35.
"""

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    root = stage.block(Weight.on("cpu", stage.log), name="root")
    root.blocks = torch.nn.ModuleList(stage.block(Weight.on("cpu", stage.log)) for _ in range(2))
    return any(use.is_raced for use in stage.play(root, passes=2) if use.name == "block")


FIX = Fix(
    name="last_group_not_waited_for",
    id="G23",
    issues=("huggingface/diffusers#11094",),
    summary="the last prefetched group is used before its copy has ended (race)",
    versions=">=0.33,<0.35",
    cure="mover",
    probe=probe,
)
