"""Q4: after a forward a torchao weight is no longer an `nn.Parameter`.

Upstream swaps the weight with a plain tensor and never swaps back, so `state_dict()`, `detach()`, `save_pretrained`
and the loading of LoRA weights raise, or miss the weight.
"""

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    weight = stage.round_trip(TorchAO.on("cpu", stage.log), stream=True)
    return not isinstance(weight, torch.nn.Parameter)


FIX = Fix(
    name="torchao_parameter_lost",
    id="Q4",
    issues=(),
    summary="torchao with streams: state_dict, detach and LoRA loading raise after a forward",
    versions=">=0.38",
    cure="mover",
    probe=probe,
)
