"""Q1: quanto's weights stay on the host, in every mode.

Upstream moves a weight with `param.data = param.data.to(device)`. On a wrapper that moves the outer tensor only, so
that the forward raises "mat2 is on cpu". The stand-in has the same two halves; real quanto weights are tested on the
simulator.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import DEVICE, Stage, evidence
from diffusers_offload_fix.fixes._weights import Wrapper


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    weight = stage.onloaded(Wrapper.on("cpu", stage.log))
    return bool(weight.leaf.device != DEVICE)


FIX = Fix(
    name="quanto_left_on_host",
    id="Q1",
    issues=(
        "huggingface/diffusers#12610",
        "huggingface/diffusers#14038",
    ),
    summary="quanto: the data of a weight never reaches the device",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
