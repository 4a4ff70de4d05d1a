"""pipe: `pipeline.to(dtype)` leaves group-offloaded components in the dtype that they have, without a word.

With a device among the arguments upstream warns about the device alone. The other components are converted, and the first forward
that joins both kinds raises (`tests/test_conversion.py`).
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._pipeline import drops_dtype, evidence

probe = evidence("to")(drops_dtype)


FIX = Fix(
    name="pipeline_drops_dtype",
    id="pipe",
    issues=(),
    summary="a pipeline's .to(dtype) leaves its offloaded components out",
    versions=">=0.33",
    cure="pipelines",
    probe=probe,
)
