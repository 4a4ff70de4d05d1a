"""D4: while weights are on disk, the model has uninitialised memory in their place.

`state_dict`, `save_pretrained` and the removal of the hooks give that memory away; `load_state_dict` and `fuse_lora` change it, and the
change is lost at the next onload.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import UNFILLED, Disk
from diffusers_offload_fix.fixes._stage import Stage, evidence


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    block, group = disk.group(disk.plain())
    group.offload_()
    return bool(block.weight0.leaf.value == UNFILLED)


FIX = Fix(
    name="disk_leaves_placeholders",
    id="D4",
    issues=(),
    summary="disk: state_dict and save_pretrained give uninitialised memory; load_state_dict and fuse_lora are ignored",
    versions=">=0.34",
    cure="mover",
    probe=probe,
)
