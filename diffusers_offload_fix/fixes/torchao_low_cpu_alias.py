"""Q2: with `low_cpu_mem_usage` the host copy of a torchao weight is the weight itself.

`.cpu()` on a torchao weight that is on the CPU returns the same object. After one forward the weight silently stays
on the device, and the second one raises `cannot pin 'torch.cuda.CharTensor'`.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    weight = stage.round_trip(TorchAO.on("cpu", stage.log), stream=True, low_cpu_mem_usage=True)
    return bool(weight.leaf.device != HOST)


FIX = Fix(
    name="torchao_low_cpu_alias",
    id="Q2",
    issues=(
        "huggingface/diffusers#14433",
        "huggingface/diffusers#14457",
    ),
    summary="torchao, use_stream and low_cpu_mem_usage: weights stay on the device, the second forward raises",
    versions=">=0.38",
    cure="mover",
    probe=probe,
)
