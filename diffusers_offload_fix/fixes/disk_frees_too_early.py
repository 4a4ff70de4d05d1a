"""D7: disk with streams: the memory of a group is freed while the computing stream may still read it.

Without `record_stream` nothing tells the allocator of that stream, and the host does not wait for it: NaN at leaf level.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import Stage, evidence


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    waits: list[int] = []
    _, group = disk.group(disk.plain(), stream=True)
    group.offload_()
    group.onload_()
    stage.accelerator.default.synchronize = lambda: waits.append(1)  # type: ignore[method-assign]
    group.offload_()
    return not waits


FIX = Fix(
    name="disk_frees_too_early",
    id="D7",
    issues=("huggingface/diffusers#14657",),
    summary="disk and streams without record_stream: memory is freed while it is still read, NaN",
    versions=">=0.34,<0.41",
    cure="mover",
    probe=probe,
)
