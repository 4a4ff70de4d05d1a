"""Q3: after a streamed offload a torchao weight still reports the device that it left.

Upstream puts the inner tensors back and leaves the outer one. What asks `param.device` is told wrong, among others
upstream's own way of loading a layer that was not prefetched, so that layers that run conditionally crash.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    weight = stage.round_trip(TorchAO.on("cpu", stage.log), stream=True)
    return bool(weight.device != weight.leaf.device)


FIX = Fix(
    name="torchao_stale_device",
    id="Q3",
    issues=(),
    summary="torchao with streams: param.device stays on the device after offload",
    versions=">=0.38",
    cure="mover",
    probe=probe,
)
