"""Q11: `Int8Tensor.pin_memory()` of torchao 0.16 and 0.17 drops `act_pre_scale` (AWQ, SmoothQuant): wrong numbers.

Upstream pins through the class. The stand-in forgets its optional part when it is pinned, as the class does.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import Forgetful


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    return not stage.round_trip(Forgetful.on("cpu", stage.log), stream=True).leaf.extra


FIX = Fix(
    name="pin_drops_scale",
    id="Q11",
    issues=(),
    summary="torchao 0.16 and 0.17 lose act_pre_scale when pinned: wrong numbers with streams",
    versions=">=0.38",
    cure="mover",
    probe=probe,
    needs=("torchao>=0.16,<0.18",),
)
