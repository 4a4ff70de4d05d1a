"""D6: other wrappers (quanto) cannot be put on disk: `data pointer on an invalid python storage`.

The wrapper itself is given to safetensors, which asks for the address of its data; only its inner tensors have one.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import Wrapper


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    _, group = disk.group(Wrapper.on(HOST, stage.log))
    try:
        group.offload_()
    except RuntimeError:
        return True
    return False


FIX = Fix(
    name="disk_fails_with_wrappers",
    id="D6",
    issues=(),
    summary="disk: quanto weights raise `invalid python storage`",
    versions=">=0.34",
    cure="mover",
    probe=probe,
)
