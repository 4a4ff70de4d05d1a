"""D3: on disk, hooks that are re-applied (a LoRA is loaded or unloaded) lose weights, or fail with KeyError.

The new group finds the file of the old one, which lacks the new tensors, and the old tensors are placeholders by then.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import Stage, evidence


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    block, group = disk.group(disk.plain(1))
    group.offload_()
    wider, again = disk.group(block.weight0, disk.plain(2))
    again.offload_()
    try:
        again.onload_()
    except KeyError:
        return True
    return bool(wider.weight0.leaf.value != 1)


FIX = Fix(
    name="disk_reapplied",
    id="D3",
    issues=(),
    summary="disk: loading or unloading a LoRA gives NaN or a KeyError",
    versions=">=0.34",
    cure="mover",
    probe=probe,
)
