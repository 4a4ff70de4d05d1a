"""Q8: a torchao weight that something holds weakly cannot be moved.

Upstream moves it with `torch.utils.swap_tensors`, which refuses a tensor with a weak reference. `torch.compile` holds
one on every parameter.
"""

import weakref

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    block = stage.block(TorchAO.on("cpu", stage.log))
    held = weakref.ref(block.weight0)
    try:
        stage.group(block).onload_()
    except RuntimeError:
        return held() is not None
    return False


FIX = Fix(
    name="swap_with_weakref",
    id="Q8",
    issues=(
        "pytorch/pytorch#186796",
        "pytorch/ao#3632",
        "huggingface/diffusers#13751",
    ),
    summary="torchao with torch.compile: cannot swap a weight that has a weak reference",
    versions=">=0.38",
    cure="mover",
    probe=probe,
)
