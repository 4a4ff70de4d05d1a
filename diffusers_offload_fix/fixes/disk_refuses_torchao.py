"""D5: torchao weights are refused on disk.

safetensors cannot hold the wrapper, and upstream does not look for the plain tensors inside it.
"""

from diffusers_offload_fix.fixes import Fix
from diffusers_offload_fix.fixes._disk import Disk
from diffusers_offload_fix.fixes._stage import HOST, Stage, evidence
from diffusers_offload_fix.fixes._weights import TorchAO


@evidence("ModuleGroup.onload_", "ModuleGroup.offload_")
def probe(stage: Stage) -> bool:
    disk = Disk(stage)
    if not disk.knows():
        return False
    _, group = disk.group(TorchAO.on(HOST, stage.log))
    try:
        group.offload_()
    except ValueError:
        return True
    except RuntimeError:
        pass  # releases before 0.38 do not tell torchao from others: D6
    return False


FIX = Fix(
    name="disk_refuses_torchao",
    id="D5",
    issues=("huggingface/diffusers#13713",),
    summary="disk: torchao weights raise ValueError",
    versions=">=0.38",
    cure="mover",
    probe=probe,
)
