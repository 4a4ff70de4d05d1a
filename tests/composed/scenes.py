"""What a user does to an offloaded model, step by step; the same is done to a resident one, and both have to agree after each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import cells
from tests.kinds import contract

from . import adapters, models

Step = tuple[str, Callable[[Any], None]]


@dataclass(frozen=True)
class Scene:
    """A model, an offloaded part of it, and what is done to it.

    Attributes:
        build: makes the model, or pipeline, with weights of a kind, on the CPU.
        part: the module of it that is offloaded.
        inputs: arguments of that module for a device and a seed.
        steps: what is done, in order, each under a name.
        on_host: True for steps that compute with weights: peft rounds differently on the host, where an offloaded model's are.
        same: names of steps that change no bit of the output; every other step has to.
    """

    build: Callable[[str], Any]
    part: Callable[[Any], torch.nn.Module]
    inputs: Callable[..., dict[str, Any]]
    steps: tuple[Step, ...]
    on_host: bool = False
    same: frozenset[str] = field(default_factory=frozenset)


def run(module: torch.nn.Module, scene: Scene, device: torch.device, seed: int) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = module(**scene.inputs(device, seed), return_dict=False)[0]
    return output


def play(scene: Scene, weights: str, mode: cells.Mode, setting: cells.Setting, warm: bool) -> tuple[list[str], list[str]]:
    """What is wrong with a scene in a mode, and the steps that the resident model refuses, too.

    `warm` runs the offloaded model once before the first step.
    """
    with setting.around():
        performance = _Play(scene, weights, mode, setting)
        return performance.faults(warm), performance.refused


class _Play:
    def __init__(self, scene: Scene, weights: str, mode: cells.Mode, setting: cells.Setting) -> None:
        self.scene, self.setting, self.device = scene, setting, setting.device
        self.resident, self.offloaded = scene.build(weights), scene.build(weights)
        scene.part(self.resident).to(self.device)
        self.mode = mode
        self.refused: list[str] = []

    def faults(self, warm: bool) -> list[str]:
        scene, module = self.scene, self.scene.part(self.offloaded)
        self.setting.enable(module, self.device, self.mode)
        found = self._compare("before") if warm else []
        last = run(scene.part(self.resident), scene, self.device, 0)
        for name, step in scene.steps:
            found += self._step(step, name)
            found += self._compare(name)
            now = run(scene.part(self.resident), scene, self.device, 0)
            if not self.refused and torch.equal(now, last) != (name in scene.same):
                found.append(f"{name}: the scene's own output {'changes' if name in scene.same else 'does not change'}")
            last = now
        return found

    def _step(self, step: Callable[[Any], None], name: str) -> list[str]:
        """Does a step to both; what the resident model refuses, the offloaded one has to refuse alike."""
        errors = []
        for model in (self.resident, self.offloaded):
            host = self.scene.on_host and model is self.resident
            try:
                with self._on_host() if host else contextlib.nullcontext():
                    step(model)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:200])
            else:
                errors.append("")
        if errors[0]:
            self.refused.append(name)
        return [] if errors[0] == errors[1] else [f"{name}: {errors[1] or 'passes'}, resident {errors[0] or 'passes'}"]

    @contextlib.contextmanager
    def _on_host(self) -> Any:
        self.scene.part(self.resident).to("cpu")
        try:
            yield
        finally:
            self.scene.part(self.resident).to(self.device)

    def _compare(self, name: str) -> list[str]:
        found = []
        for seed in range(2):
            wanted = run(self.scene.part(self.resident), self.scene, self.device, seed)
            try:
                got = run(self.scene.part(self.offloaded), self.scene, self.device, seed)
            except Exception as error:
                return [f"{name}: {type(error).__name__}: {str(error)[:160]}"]
            if not torch.equal(got, wanted):
                nan = " (NaN)" if got.isnan().any() else ""
                found.append(f"{name}: the output differs{nan}")
        return found + [f"{name}: {text}" for text in contract.leaves_off(self.scene.part(self.offloaded), "cpu")[:2]]


def _flux(*steps: Step, **options: Any) -> Scene:
    return Scene(models.flux_pipeline, lambda pipe: pipe.transformer, models.flux_inputs, steps, **options)


def _unet(*steps: Step, **options: Any) -> Scene:
    return Scene(lambda weights: models.unet(), lambda unet: unet, models.unet_inputs, steps, **options)


#: By name; the names are those of the methods that a user calls.
SCENES: dict[str, Scene] = {
    "load_lora_weights": _flux(
        ("load", adapters.load("a", 1)),
        ("load another", adapters.load("b", 2, rank=2)),
        ("set_adapters", lambda pipe: pipe.set_adapters(["a", "b"], [0.5, 2.0])),
        ("delete_adapters", lambda pipe: pipe.delete_adapters("a")),
        ("unload", lambda pipe: pipe.unload_lora_weights()),
    ),
    "zero LoRA": _flux(("load", adapters.load("a", 1, zero=True)), same=frozenset({"load"})),
    "fuse_lora": _flux(
        ("load", adapters.load("a", 1)),
        ("fuse", lambda pipe: pipe.fuse_lora(lora_scale=0.7)),
        ("unfuse", lambda pipe: pipe.unfuse_lora()),
        ("fuse again", lambda pipe: pipe.fuse_lora()),
        ("unload", lambda pipe: pipe.unload_lora_weights()),
        on_host=True,
        same=frozenset({"unload"}),
    ),
    "add_adapter": _flux(
        ("add", adapters.add),
        ("disable", lambda pipe: pipe.transformer.disable_adapters()),
        ("enable", lambda pipe: pipe.transformer.enable_adapters()),
    ),
    "fuse_qkv_projections": _flux(
        ("fuse", lambda pipe: pipe.transformer.fuse_qkv_projections()),
        ("edit", lambda pipe: adapters.double(pipe.transformer.transformer_blocks[0].attn.to_qkv)),
        same=frozenset({"fuse"}),
    ),
    "replaced submodules": _flux(("replace", adapters.replace)),
    "load_state_dict(assign=True)": _flux(("assign", adapters.assign)),
    ".to(dtype)": _flux(("half", lambda pipe: pipe.transformer.half().bfloat16()), ("edit", adapters.edit), same=frozenset({"half"})),
    "IP-Adapter": _unet(("load", adapters.load_ip_adapter), ("unload", adapters.unload_ip_adapter)),
    "UNet LoRA": _unet(("load", adapters.load_unet), ("unload", lambda unet: unet.unload_lora())),
    "textual inversion": Scene(
        models.text_encoder, lambda encoder: encoder, models.text_inputs, (("extend", adapters.extend_vocabulary),)
    ),
}
#: Scenes with quantised weights, and the steps that diffusers or peft refuse there, offloaded or not: diffusers does not find the
#: shapes of quanto's weights, and peft merges into torchao's only for a model that was quantised through its own config.
QUANTISED: dict[tuple[str, str], set[str]] = {
    ("load_lora_weights", "torchao-int8"): set(),
    ("fuse_lora", "torchao-int8"): {"fuse", "fuse again"},
    ("add_adapter", "torchao-int8"): set(),
    ("load_lora_weights", "quanto-qint8"): {"load", "load another", "set_adapters"},
    ("add_adapter", "quanto-qint8"): set(),
}
