"""A stand-in for a disk on the stage: files are dictionaries, and a tensor whose memory was never filled is told from one that was."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any

import torch

from diffusers_offload_fix.fixes._stage import HOST, Stage
from diffusers_offload_fix.fixes._weights import Leaf, Weight, Wrapper

#: The value of memory that nobody has filled.
UNFILLED = -1
FOLDER = "folder"


class Disk:
    """What upstream's code finds in the place of `safetensors` and `os`.

    Attributes:
        files: what each file holds.
        loads: the devices that files were loaded to, in order.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.files: dict[str, dict[str, Any]] = {}
        self.loads: list[torch.device] = []
        space = stage.module.ModuleGroup.onload_.__globals__
        space["safetensors"] = SimpleNamespace(torch=SimpleNamespace(save_file=self.save, load_file=self.load))
        path = SimpleNamespace(join=os.path.join, dirname=os.path.dirname, exists=self.files.__contains__)
        space["os"] = SimpleNamespace(path=path, makedirs=lambda *args, **kwargs: None)
        space["torch"].empty_like = lambda weight, device: self._weight(UNFILLED, torch.device(device))

    def save(self, tensors: dict[str, Any], path: str) -> None:
        """As safetensors, which asks for the address of the data: a wrapper has none."""
        if any(isinstance(tensor, Wrapper) for tensor in tensors.values()):
            raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")
        self.files[path] = {key: tensor.leaf.value for key, tensor in tensors.items()}

    def load(self, path: str, device: Any = "cpu") -> dict[str, Any]:
        """New tensors; a device without an index is the current one."""
        place = torch.device(device)
        if place.type != "cpu" and place.index is None:
            place = torch.device(place.type, self.stage.accelerator.index)
        self.loads.append(place)
        return {key: self._weight(value, place) for key, value in self.files[path].items()}

    def _weight(self, value: int, device: torch.device) -> Any:
        return Weight.around(Leaf(device, value=value), self.stage.log)

    def knows(self) -> bool:
        """False for a release that cannot offload to disk."""
        return "offload_to_disk_path" in inspect.signature(self.stage.module.ModuleGroup.__init__).parameters

    def group(self, *weights: Any, name: str = "blocks_0_0", stream: bool = False) -> tuple[Any, Any]:
        """A block with these weights, and its group in a file; the release gives the group a name or does not."""
        block = self.stage.block(*weights)
        named = "group_id" in inspect.signature(self.stage.module.ModuleGroup.__init__).parameters
        options = {"group_id": name} if named else {}
        return block, self.stage.group(block, stream=stream, offload_to_disk_path=FOLDER, **options)

    def plain(self, value: int = 1) -> Any:
        """A weight on the host."""
        return Weight.on(HOST, self.stage.log, value=value)
