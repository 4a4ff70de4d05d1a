"""D8: every group on disk is read twice.

Where no stream is used, the file is loaded once before the branch and once inside it.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import Stage, evidence


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    _, group = disk.group(disk.plain())
    group.offload_()
    group.onload_()
    return len(disk.loads) > 1


FIX = Fix(
    name="disk_read_twice",
    id="D8",
    issues=("huggingface/diffusers#13851",),
    summary="disk: every group is read twice",
    versions=">=0.35,<0.39",
    cure="mover",
    probe=probe,
)
