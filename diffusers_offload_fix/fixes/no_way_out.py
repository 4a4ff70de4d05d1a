"""G13: nothing turns group offloading off; `pipe.remove_all_hooks()` leaves it on, and `enable_model_cpu_offload` then refuses.

`tests/test_pipelines.py` meets it in a real pipeline.
"""

from types import SimpleNamespace
from typing import Any

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._pipeline import Component, evidence


class Registry:
    """The hooks of a module that is group-offloaded."""

    def __init__(self) -> None:
        self.hooks = {"group_offloading": object()}

    def remove_hook(self, name: str, recurse: bool = True) -> None:
        self.hooks.pop(name, None)


@evidence("remove_all_hooks")
def probe(method: Any) -> bool:
    component: Any = Component([])
    component._diffusers_hook = Registry()
    method(SimpleNamespace(components={"transformer": component}))
    return bool(component._diffusers_hook.hooks)


FIX = Fix(
    name="no_way_out",
    id="G13",
    issues=("huggingface/diffusers#10452",),
    summary="group offloading cannot be turned off",
    versions=">=0.33",
    cure="pipelines",
    probe=probe,
)
