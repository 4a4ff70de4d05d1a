"""M1: on `cuda:1`, weights on disk are loaded to the current device, `cuda:0`.

safetensors is told the type of the onload device, without its index.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    _, group = disk.group(disk.plain())
    group.offload_()
    group.onload_()
    return any(device != DEVICE for device in disk.loads)


FIX = Fix(
    name="disk_loads_to_current_device",
    id="M1",
    issues=(),
    summary="disk, on a device that is not the current one: weights are loaded to the current one",
    versions=">=0.34",
    cure="mover",
    probe=probe,
)
