"""Q14: torchao's weights cannot be moved under `torch.inference_mode()`.

torchao's `.to`, `.data =`, `pin_memory` and `detach` raise there, and upstream calls them inside the caller's mode.
"""

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import NoInference


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    try:
        with torch.inference_mode():
            stage.onloaded(NoInference.on("cpu", stage.log))
    except RuntimeError:
        return True
    return False


FIX = Fix(
    name="inference_mode",
    id="Q14",
    issues=(),
    summary="torchao under torch.inference_mode(): the first onload raises",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
