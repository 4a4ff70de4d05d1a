"""G6: a weight that is changed after enabling is undone at the next onload, with streams.

Upstream copies every weight once, when the group is made (root cause RC5). A later `.to(dtype)`, `.half()` or
`param.data = …` is lost.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    block = stage.block(Weight.on("cpu", stage.log, value=1))
    group = stage.group(block, stream=True)
    group.offload_()
    block.weight0.data = Weight.on("cpu", stage.log, value=2)
    group.onload_()
    return bool(block.weight0.leaf.value != 2)


FIX = Fix(
    name="host_copy_is_snapshot",
    id="G6",
    issues=(),
    summary="streams: a changed dtype or .data is undone at the next onload",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
