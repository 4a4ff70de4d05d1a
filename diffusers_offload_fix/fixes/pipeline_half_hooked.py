"""G8: `pipe.enable_group_offload` raises half-way when a component does not support it, and the ones before stay hooked.

Afterwards the pipeline can neither run, nor be moved, nor be offloaded in another way. `tests/test_pipelines.py` meets it in a real
pipeline.
"""

from types import SimpleNamespace
from typing import Any

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._pipeline import Component, evidence


@evidence("enable_group_offload")
def probe(method: Any) -> bool:
    log: list[str] = []
    pipeline = SimpleNamespace(components={"transformer": Component(log), "vae": Component(log, supports=False)})
    try:
        method(pipeline, "cuda")
    except ValueError:
        return bool(log)
    return False


FIX = Fix(
    name="pipeline_half_hooked",
    id="G8",
    issues=("huggingface/diffusers#12283",),
    summary="a pipeline stays half offloaded when one component does not support it",
    versions=">=0.36",
    cure="pipelines",
    probe=probe,
)
