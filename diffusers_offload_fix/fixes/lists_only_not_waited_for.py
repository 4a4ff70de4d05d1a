"""G22: when the root has only ModuleLists, block-level streams wait for nothing.

Upstream then attaches no hook to the root, so that no pass is a blocking one and no prefetching is set up. The probe
looks at the order of copy, wait and use in the first pass; the NaN show on the simulator.
"""

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    root = stage.block(name="root")
    names = ("first", "last")  # the last one has a bug of its own in older releases, G23
    root.blocks = torch.nn.ModuleList(stage.block(Weight.on("cpu", stage.log), name=name) for name in names)
    return any(use.is_raced for use in stage.play(root) if use.name == "first")


FIX = Fix(
    name="lists_only_not_waited_for",
    id="G22",
    issues=(),
    summary="block_level streams on a model of ModuleLists only: weights are used before their copy has ended (race)",
    versions=">=0.36",
    cure="mover",
    probe=probe,
)
