"""pipe: `pipeline.to(dtype)` leaves group-offloaded components in the dtype that they have, without a word.

With a device among the arguments upstream warns about the device alone. The other components are converted, and the first forward
that joins both kinds raises (`tests/test_conversion.py`).
"""

from types import SimpleNamespace
from typing import Any

import torch

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._model import Model
from diffusers_offload_fix.fixes._pipeline import evidence


class Transformer(Model):
    """A group-offloaded component."""

    dtype = torch.float32


@evidence("to")
def probe(method: Any) -> bool:
    transformer = Transformer()
    pipeline = SimpleNamespace(
        components={"transformer": transformer},
        transformer=transformer,
        hf_device_map=None,
        _is_pipeline_device_mapped=lambda: False,
        _get_signature_keys=lambda pipeline: ({"transformer"}, set()),
        _maybe_raise_error_if_group_offload_active=lambda **_: True,
    )
    method(pipeline, torch.float16)
    return not any(dtype is torch.float16 for _, dtype in transformer.converted)


FIX = Fix(
    name="pipeline_drops_dtype",
    id="pipe",
    issues=(),
    summary="a pipeline's .to(dtype) leaves its offloaded components out",
    versions=">=0.33",
    cure="pipelines",
    probe=probe,
)
