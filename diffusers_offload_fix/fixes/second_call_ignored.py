"""G10: enabling group offloading a second time, with another configuration, is ignored without streams and raises with them.

Upstream keeps the hooks that are there, and refuses a second one of the kind that learns the order. `tests/test_applying.py` meets it.
"""

from torch import nn

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("_apply_group_offloading_block_level", "_apply_group_offloading_leaf_level")
def probe(stage: Stage) -> bool:
    model = stage.block(Weight.on("cpu", stage.log))
    model.blocks = nn.ModuleList([stage.block(Weight.on("cpu", stage.log)) for _ in range(2)])
    for size in (1, 2):
        options = {"offload_type": "block_level", "num_blocks_per_group": size}
        stage.module.apply_group_offloading(model, onload_device=DEVICE, **options)
    group = model.blocks[0]._diffusers_hook.hooks["group_offloading"].group  # type: ignore[union-attr, index]
    return len(group.modules) == 1


FIX = Fix(
    name="second_call_ignored",
    id="G10",
    issues=(),
    summary="enabling a second time does not do what the second call says",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
