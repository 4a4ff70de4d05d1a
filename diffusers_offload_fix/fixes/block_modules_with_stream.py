"""G9: `block_modules` together with streams raises, because the hooks that learn the order are added once for each of the modules.

The error is `Hook with name layer_execution_tracker already exists`. `tests/test_modes.py` runs such a model.
"""

from torch import nn

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("_apply_group_offloading_block_level", "LazyPrefetchGroupOffloadingHook.initialize_hook")
def probe(stage: Stage) -> bool:
    part = stage.block(Weight.on("cpu", stage.log))
    part.blocks = nn.ModuleList([stage.block(Weight.on("cpu", stage.log)) for _ in range(2)])
    model = stage.block(Weight.on("cpu", stage.log))
    model.encoder = part
    options = {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True}
    try:
        stage.module.apply_group_offloading(model, onload_device=DEVICE, block_modules=["encoder"], **options)
    except TypeError:
        return False  # a release that has no such argument
    except ValueError as error:
        return "already exists" in str(error)
    return False


FIX = Fix(
    name="block_modules_with_stream",
    id="G9",
    issues=("huggingface/diffusers#11960",),
    summary="block_modules with streams raises",
    versions=">=0.36",
    cure="mover",
    probe=probe,
)
