"""moved: `model.to(tensor)` and `model.to(0)` move the weights of a group-offloaded model to the device, all of them at once.

Upstream's guard knows a device by its type or as a string, not as a number or as that of another tensor.
"""

from typing import Any

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._model import Offloaded, evidence


@evidence("to")
def probe(method: Any) -> bool:
    model = Offloaded()
    method(model, torch.empty(0))
    return any(device is not None for device, _ in model.converted)


FIX = Fix(
    name="moved_by_tensor",
    id="moved",
    issues=(),
    summary="an offloaded model is moved as a whole by .to(tensor) and .to(0)",
    versions=">=0.33",
    cure="models",
    probe=probe,
)
