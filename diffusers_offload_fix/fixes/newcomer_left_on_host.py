"""G7: a module that comes under the model after enabling has no hook, and its weights stay on the host.

A block is replaced, projections are fused, an adapter is added: upstream hooks what is there when offloading is enabled.
"""

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("_apply_group_offloading_block_level", "_apply_group_offloading_leaf_level")
def probe(stage: Stage) -> bool:
    root = stage.block(Weight.on("cpu", stage.log), name="root")
    root.blocks = torch.nn.ModuleList(stage.block(Weight.on("cpu", stage.log)) for _ in range(2))
    stage.module.apply_group_offloading(root, onload_device=DEVICE, offload_type="block_level", num_blocks_per_group=1)
    root.blocks[1] = stage.block(Weight.on("cpu", stage.log), name="newcomer")
    root()
    return any(use.name == "newcomer" and use.device == HOST for use in stage.log.uses)


FIX = Fix(
    name="newcomer_left_on_host",
    id="G7",
    issues=(),
    summary="modules that are added or replaced after enabling stay on the host",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
