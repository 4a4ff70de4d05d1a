"""A parameter that two neighbouring groups share is taken away by the first when the second needs it, with streams.

The second group's weights are prefetched before the first has run; the first one's offload then moves the shared
parameter back.
"""

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence, parameter
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    shared = parameter(Weight.on("cpu", stage.log))
    root = stage.block(Weight.on("cpu", stage.log), name="root")
    # Its own weight comes first: from 0.37 upstream looks at the first one to tell whether the group has to be loaded.
    root.blocks = torch.nn.ModuleList(stage.block(Weight.on("cpu", stage.log), shared) for _ in range(2))
    uses = stage.play(root, passes=2)
    return any(use.device != DEVICE for use in uses if use.name == "block")


FIX = Fix(
    name="tied_across_groups",
    id="tied",
    issues=(),
    summary="a parameter shared by two groups is on the host when the second one runs",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
