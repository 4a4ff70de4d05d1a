"""mpipe: `to(dtype)` of a modular pipeline leaves group-offloaded components in the dtype that they have, as other pipelines' does.

With a device among the arguments upstream warns about the device alone. The other components are converted, and the first forward
that joins both kinds raises (`tests/test_conversion.py`).
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._pipeline import drops_dtype, evidence

probe = evidence("to", is_modular=True)(drops_dtype)


FIX = Fix(
    name="modular_drops_dtype",
    id="mpipe",
    issues=(),
    summary="a modular pipeline's .to(dtype) leaves its offloaded components out",
    versions=">=0.35",
    cure="modular",
    probe=probe,
)
