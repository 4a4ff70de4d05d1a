"""G2: at block level a model whose list of blocks is not a child of its own is one group of everything: nothing is saved.

T5, CLIP and every `*ForCausalLM` keep their layers one or more modules down. `tests/test_nested_blocks.py` measures it.
"""

from torch import nn

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("_apply_group_offloading_block_level")
def probe(stage: Stage) -> bool:
    blocks = [stage.block(Weight.on("cpu", stage.log)) for _ in range(3)]
    stack, model = stage.block(), stage.block()
    stack.layers = nn.ModuleList(blocks)
    model.encoder = stack
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    stage.module.apply_group_offloading(model, onload_device=DEVICE, **options)
    return not any(hasattr(block, "_diffusers_hook") for block in blocks)


FIX = Fix(
    name="nested_blocks_one_group",
    id="G2",
    issues=(),
    summary="block level saves nothing where the blocks lie deeper than one module",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
