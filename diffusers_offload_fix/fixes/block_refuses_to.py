"""G5: a block that is itself a `ModelMixin` (as in MultiControlNet) stays on the device, without streams.

Upstream offloads with `module.to(device)`, and `ModelMixin.to` does nothing on a model that is group-offloaded.
"""

from typing import Any

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import HOST, Block, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    class Model(Block):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            return self

    model = Model(stage.log, Weight.on("cpu", stage.log))
    group = stage.group(model)
    group.onload_()
    group.offload_()
    return bool(model.weight0.device != HOST)


FIX = Fix(
    name="block_refuses_to",
    id="G5",
    issues=(),
    summary="a block that is a ModelMixin keeps all of its weights on the device",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
