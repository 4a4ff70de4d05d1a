"""M2: the stream of a model on `cuda:1` is created on the current device, `cuda:0`.

Its copies then do not run beside the computation. Upstream creates the stream without saying on which device.
"""

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    root = stage.block(Weight.on("cpu", stage.log), name="root")
    root.blocks = torch.nn.ModuleList([stage.block(Weight.on("cpu", stage.log))])
    stage.play(root, passes=0)
    return any(stream.index != DEVICE.index for stream in stage.log.streams)


FIX = Fix(
    name="stream_on_wrong_device",
    id="M2",
    issues=(),
    summary="on a device that is not the current one, the stream is made on the wrong device: no overlap",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
