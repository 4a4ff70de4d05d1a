"""G3: with streams the buffers of a group's modules stay on the device.

Upstream's offload with streams restores the parameters of the modules and forgets their buffers. What a forward wrote
to a buffer is then overwritten by the next onload.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    block = stage.block()
    block.register_buffer("counter", Weight.on("cpu", stage.log))
    group = stage.group(block, stream=True)
    group.onload_()
    group.offload_()
    return bool(block.counter.device != HOST)


FIX = Fix(
    name="buffers_left_on_device",
    id="G3",
    issues=("huggingface/diffusers#13238",),
    summary="streams: buffers stay on the device, and updates to them are lost",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
