"""Q6: most of torchao's classes cannot be pinned, and upstream pins every weight with streams.

`AffineQuantizedTensor`, `IntxUnpackedToInt8Tensor`, `Int4TilePackedTo4dTensor` and others raise `unimplemented operator
aten.is_pinned` (low_cpu_mem_usage) or `aten._pin_memory`.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import Unpinnable


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    try:
        stage.onloaded(Unpinnable.on("cpu", stage.log), stream=True)
    except NotImplementedError:
        return True
    return False


FIX = Fix(
    name="unpinnable_wrapper",
    id="Q6",
    issues=(
        "huggingface/diffusers#13281",
        "huggingface/diffusers#14112",
        "pytorch/ao#3373",
        "pytorch/ao#4158",
    ),
    summary="int4, intx and v1 weights cannot be pinned: streams raise",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
