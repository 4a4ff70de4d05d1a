"""G14: layerwise casting that is enabled after offloading casts on the host, so that the larger dtype is loaded.

Hooks run in the order in which they were registered, the latest first. What is enabled last must not decide what travels.
"""

from typing import Any

import torch

from diffusers_offload_fix import patcher
from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._stage import HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import Weight


@evidence("HookRegistry.register_hook", "ModuleGroup.onload_")
def probe(stage: Stage) -> bool:
    class Casting(stage.module.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            found.append(block.weight0.leaf.device)
            return args, kwargs

    found: list[torch.device] = []
    block = stage.block(Weight.on("cpu", stage.log))
    register = patcher.original(stage.module.HookRegistry, "register_hook")
    registry = stage.module.HookRegistry(block)
    register(registry, stage.hook(stage.group(block)), "group_offloading")
    register(registry, Casting(), "layerwise_casting")
    block()
    return found == [HOST]


FIX = Fix(
    name="cast_before_loading",
    id="G14",
    issues=(),
    summary="layerwise casting after offloading: the larger dtype is what travels",
    versions=">=0.33",
    cure="mover",
    probe=probe,
)
