"""G20: `record_stream=True` records the stream of the copy instead of the one that computes.

The allocator then hands out memory that the forward still reads: garbage images. Fixed upstream in 0.36.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    stage.onloaded(Weight.on("cpu", stage.log), stream=True, record_stream=True)
    return any(stream is not stage.accelerator.default for stream in stage.log.recorded)


FIX = Fix(
    name="wrong_stream_recorded",
    id="G20",
    issues=(
        "huggingface/diffusers#12673",
        "huggingface/diffusers#12721",
    ),
    summary="record_stream records the wrong stream: garbage images",
    versions="==0.35.*",
    cure="mover",
    probe=probe,
)
