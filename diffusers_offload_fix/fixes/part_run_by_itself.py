"""G1: at block level a part that is run without its model's forward finds its weights on the host.

Autoencoders are run by `encode` and `decode`, which call their parts directly. `tests/test_nested_blocks.py` runs real ones.
"""

from torch import nn

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("_apply_group_offloading_block_level")
def probe(stage: Stage) -> bool:
    part = stage.block(Weight.on("cpu", stage.log), name="part")
    model = stage.block()
    model.post_quant_conv = part
    model.blocks = nn.ModuleList([stage.block(Weight.on("cpu", stage.log))])
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    stage.module.apply_group_offloading(model, onload_device=DEVICE, **options)
    part()
    return any(use.name == "part" and use.device == HOST for use in stage.log.uses)


FIX = Fix(
    name="part_run_by_itself",
    id="G1",
    issues=("huggingface/diffusers#12319", "huggingface/diffusers#11086", "huggingface/diffusers#12096"),
    summary="block level fails for models that are run by encode and decode",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
