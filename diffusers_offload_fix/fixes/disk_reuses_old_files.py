"""D2: a folder that was used before gives the weights of the older run.

Whether a file exists is all that is asked; whose it is, and what it holds, is not (root cause RC6).
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import Stage, evidence


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    _, before = disk.group(disk.plain(1))
    before.offload_()
    del before
    block, group = disk.group(disk.plain(2))
    group.offload_()
    group.onload_()
    return bool(block.weight0.leaf.value == 1)


FIX = Fix(
    name="disk_reuses_old_files",
    id="D2",
    issues=(),
    summary="disk: a folder that was used before gives an older run's weights",
    versions=">=0.35",
    cure="mover",
    probe=probe,
)
