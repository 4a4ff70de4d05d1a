"""D1: two components share file names on disk, so the second computes with the weights of the first.

The name of a file is made from the place of the group in its model ("transformer_blocks_0_0") and from nothing else, and a file that
exists is taken for the group's own (root cause RC6).
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import Stage, evidence


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    first, second = (disk.group(disk.plain(value)) for value in (1, 2))
    for _, group in (first, second):
        group.offload_()
    second[1].onload_()
    return bool(second[0].weight0.leaf.value != 2)


FIX = Fix(
    name="disk_shared_by_components",
    id="D1",
    issues=(),
    summary="disk: two components in one folder share files, and the second computes with the first one's weights",
    versions=">=0.35",
    cure="mover",
    probe=probe,
)
