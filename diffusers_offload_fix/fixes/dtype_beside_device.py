"""dtype: `model.to(device, dtype)` and `model.to(dtype=…, device=…)` on a group-offloaded model drop the dtype.

Upstream says that the device is not supported, and returns before the dtype is applied. An IP-Adapter's loader names both, so that
its projection layers keep the dtype of their file (`tests/test_conversion.py`).
"""

from typing import Any

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._model import Offloaded, evidence


@evidence("to")
def probe(method: Any) -> bool:
    model = Offloaded()
    method(model, torch.device("cpu"), torch.float16)
    return not any(dtype is torch.float16 for _, dtype in model.converted)


FIX = Fix(
    name="dtype_beside_device",
    id="dtype",
    issues=(),
    summary="an offloaded model drops the dtype of .to(device, dtype)",
    versions=">=0.33",
    cure="models",
    probe=probe,
)
