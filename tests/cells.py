"""One cell of the matrix: a kind of tensor, in a memory mode, compared bit for bit with the resident model.

Used on the simulated accelerator and on a real GPU alike; a cell is a list of faults, empty when everything holds.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diffusers_offload_fix import idle, lane
from diffusers_offload_fix.layout import align
from tests.kinds import contract
from tests.kinds.catalogue import KINDS, Kind
from tests.kinds.models import annotate

PASSES = 4
#: Bytes of a group that counts as small here.
SMALL = 512
#: Orders of a stack's blocks, tried one after another: skipped, repeated, reversed, and back.
PLANS: tuple[Any, ...] = ((0, 2), (1, 1, 3, 1), (3, 2, 1, 0), None)


@dataclass(frozen=True)
class Mode:
    """Arguments of `apply_group_offloading`, under a name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def streamed(self) -> bool:
        return bool(self.arguments.get("use_stream"))

    @property
    def disk(self) -> bool:
        return "offload_to_disk_path" in self.arguments

    @property
    def low(self) -> bool:
        """True if no more than a few staging buffers may be pinned."""
        return self.disk or bool(self.arguments.get("low_cpu_mem_usage"))


def _modes() -> Iterator[Mode]:
    kinds = {"block": {"offload_type": "block_level", "num_blocks_per_group": 1}, "leaf": {"offload_type": "leaf_level"}}
    flags: dict[str, dict[str, Any]] = {
        "": {},
        "+nonblocking": {"non_blocking": True},
        "+low": {"low_cpu_mem_usage": True},
        "+stream": {"use_stream": True},
        "+stream+record": {"use_stream": True, "record_stream": True},
        "+stream+low": {"use_stream": True, "low_cpu_mem_usage": True},
        "+stream+record+low": {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": True},
    }
    for kind, base in kinds.items():
        for name, extra in flags.items():
            yield Mode(kind + name, {**base, **extra})
    yield Mode("block2", {**kinds["block"], "num_blocks_per_group": 2})
    yield Mode("block3+nonblocking", {**kinds["block"], "num_blocks_per_group": 3, "non_blocking": True})


MODES: dict[str, Mode] = {mode.name: mode for mode in _modes()}

#: Where the disk modes put their files: a folder that the plugin makes if it is missing, and in which nothing stays.
FOLDER = os.path.join(os.environ.get("DIFFUSERS_OFFLOAD_FIX_TEST_FOLDER") or tempfile.gettempdir(), f"cells-{os.getpid()}")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def _disk_modes() -> Iterator[Mode]:
    for name in ("block", "block+stream", "block+stream+record", "block+stream+low"):
        for mode in (MODES[name], MODES[name.replace("block", "leaf")]):
            yield Mode(f"{mode.name}+disk", {**mode.arguments, "offload_to_disk_path": FOLDER})
    yield Mode("block2+disk", {**MODES["block2"].arguments, "offload_to_disk_path": FOLDER})


#: The same with the weights in files; apart, so that the matrix of memory modes stays as long as it is.
DISK_MODES: dict[str, Mode] = {mode.name: mode for mode in _disk_modes()}


def mode_of(name: str) -> Mode:
    """A mode of either kind."""
    return MODES[name] if name in MODES else DISK_MODES[name]


@dataclass
class Setting:
    """Where and how cells run: the device, a way to enable offloading there, and a way to read its live bytes."""

    device: torch.device
    enable: Callable[..., None]
    live_bytes: Callable[[], int]
    pinned_bytes: Callable[[], int]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def run(kind: Kind | str, mode: Mode, setting: Setting, quantised_on: str = "cpu") -> list[str]:
    """The faults of one cell."""
    kind = KINDS[kind] if isinstance(kind, str) else kind
    cell = Cell(kind, mode, setting, quantised_on)
    # The models are tiny: with the real limit every group would be small, and none would go through the slots.
    before, lane.SMALL = lane.SMALL, SMALL
    # A slow machine must not end the loops of a cell: what is given back meanwhile would be taken for the resident model's.
    pause, idle.PAUSE = idle.PAUSE, 3600.0
    try:
        with torch.no_grad(), setting.around():
            cell.check()
    finally:
        lane.SMALL, idle.PAUSE = before, pause
        cell.close()
    return cell.faults


class Cell:
    """The work of one cell, with the models that it needs."""

    def __init__(self, kind: Kind, mode: Mode, setting: Setting, quantised_on: str) -> None:
        self.kind, self.mode, self.setting = kind, mode, setting
        self.device = setting.device
        self.faults: list[str] = []
        origin = self.device if quantised_on == "accelerator" else "cpu"
        self.expected, example = kind.resident(self.device, quantised_on=quantised_on)
        self.example = example.to(self.device)
        self.warm_up()
        gc.collect()
        self.before = setting.live_bytes()
        self.pinned = setting.pinned_bytes()
        self.model, _ = kind.build(origin)
        self.from_cpu = origin == "cpu"
        self.print = contract.fingerprint(self.wanted_at_rest(origin))
        self.ids = contract.snapshot_ids(self.model)
        self.ties = contract.tied_names(self.model)

    def wanted_at_rest(self, origin: Any) -> nn.Module:
        """The model as it must look while offloaded: as it is, or what its classes make of it on the host."""
        if origin == "cpu" or "repack" not in self.kind.tags:
            return self.model
        model = self.kind.build(origin)[0].to("cpu")
        annotate(model)
        return model

    def warm_up(self) -> None:
        """Lets the resident model make what it makes at its first forward, unless a forward changes it."""
        if "buffers" not in self.kind.tags:
            with torch.no_grad(), self.setting.around():
                self.expected(self.example)

    def check(self) -> None:
        """Runs everything that the contract asks of a cell."""
        self.setting.enable(self.model, self.device, self.mode)
        self.at_rest("after enabling")
        with idle.loop():
            for index in range(PASSES - 1):
                self.forward(f"pass {index + 1}", between=True)
        self.at_rest("after a loop")
        self.forward(f"pass {PASSES}")
        if hasattr(self.model, "fail_at"):
            self.interrupted()
        if hasattr(self.model, "plan"):
            self.orders()

    def forward(self, when: str, between: bool = False) -> None:
        """One forward of both models, compared, and the state of the offloaded one afterwards."""
        with torch.no_grad():
            wanted = self.wanted()
            got = self.model(self.example)
        self.compare(got, wanted, when)
        del got, wanted
        self.at_rest(when, between)

    def wanted(self) -> torch.Tensor:
        """The resident model's output. What else that model makes for itself on the device is not held against the other."""
        before = self.setting.live_bytes()
        output: torch.Tensor = self.expected(self.example)
        gc.collect()
        self.before += self.setting.live_bytes() - before - output.untyped_storage().nbytes()
        return output

    def compare(self, got: Any, wanted: Any, when: str) -> None:
        """Bit equality; NaN equals nothing."""
        if got.device != wanted.device:
            self.faults.append(f"{when}: output on {got.device}")
        elif not torch.equal(got, wanted):
            nan = " (NaN)" if torch.isnan(got.float()).any() else ""
            worst = (got.float() - wanted.float()).abs().max().item()
            self.faults.append(f"{when}: output differs by {worst:.3g}{nan}")

    def at_rest(self, when: str, between: bool = False) -> None:
        """Everything is on the host, honest about it, and as it was or as the resident model now has it.

        Args:
            between: another forward follows at once, as in a loop.
        """
        found = contract.leaves_off(self.model, "cpu")
        gc.collect()
        if extra := self.kept(between):
            found.append(f"{extra} bytes of device memory are kept")
        if contract.snapshot_ids(self.model) != self.ids:
            found.append("a parameter is another object")
        if contract.tied_names(self.model) != self.ties:
            found.append("a tie is broken")
        found += self.contents()
        if self.mode.disk and os.path.isdir(FOLDER) and os.listdir(FOLDER):
            found.append(f"files are left: {os.listdir(FOLDER)}")
        if self.mode.low and (pinned := self.setting.pinned_bytes() - self.pinned) > self.pin_allowance():
            found.append(f"{pinned} bytes are pinned")
        self.faults += [f"{when}: {text}" for text in found[:6]]

    def kept(self, between: bool) -> int:
        """Bytes of device memory that are kept and must not be: between the forwards of a loop slots may stay, and nothing else."""
        extra = self.setting.live_bytes() - self.before
        allowed = self.slot_allowance() if between and self.mode.streamed else 0
        return extra if extra > allowed else 0

    def slot_allowance(self) -> int:
        """Two slots of the largest group, the modules that are no blocks, and what is too small to be copied each time."""
        blocks = getattr(self.model, "blocks", ())
        rest = [module for module in self.model.children() if module is not blocks]
        sizes = [sum(align(leaf.nbytes) for t in tensors(module) for _, leaf in contract.leaves(t)) for module in [*blocks, *rest]]
        own = sum(align(leaf.nbytes) for t in own_tensors(self.model) for _, leaf in contract.leaves(t))
        # A leaf with gaps takes room as it travels and again as it is laid out.
        small = sum(size for t in tensors(self.model) if (size := align(t.nbytes)) <= 2 * lane.SMALL)
        return 2 * (2 * max(sizes, default=0) + sum(sizes[len(blocks) :]) + own) + small

    def pin_allowance(self) -> int:
        """Bytes that `low_cpu_mem_usage` may keep pinned: staging for three of the largest groups, never the weights."""
        modules = [*self.model.children(), *getattr(self.model, "blocks", ())]
        tensors = [[*module.parameters(), *module.buffers()] for module in modules]
        tensors.append([*self.model.parameters(recurse=False), *self.model.buffers(recurse=False)])
        sizes = [sum(leaf.nbytes for t in group for _, leaf in contract.leaves(t)) for group in tensors]
        # Alignment can double a tensor of this size.
        return 3 * 2 * max(sizes, default=0)

    def contents(self) -> list[str]:
        """The bytes, attributes and layout against the model before enabling."""
        now = contract.fingerprint(self.model)
        if {"buffers", "state"} & self.kind.tags:
            wanted = contract.fingerprint(self.expected)
            return [text for text in contract.diff(wanted, now, devices=False) if "bytes differ" in text]
        return contract.diff(self.print, now, devices=self.from_cpu)

    def interrupted(self) -> None:
        """A forward that raises half-way leaves everything as after any forward."""
        depth = len(self.model.blocks)
        self.model.fail_at = depth // 2
        raised = False
        try:
            with torch.no_grad():
                self.model(self.example)
        except RuntimeError as error:
            raised = "told to fail" in str(error)
        if not raised:
            self.faults.append("the planned failure did not come through")
        self.model.fail_at = None
        if "buffers" in self.kind.tags:
            return
        self.at_rest("after a failure")
        self.forward("after a failure, next pass")

    def orders(self) -> None:
        """Other orders of the blocks than the one that was learnt."""
        if "buffers" in self.kind.tags:
            return
        with idle.loop():
            for plan in PLANS:
                self.model.plan = self.expected.plan = plan
                self.forward(f"order {plan}", between=True)
        self.at_rest("after a loop over orders")

    def close(self) -> None:
        """Lets go of the models."""
        del self.model, self.expected
        gc.collect()


def tensors(module: nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer of a module."""
    return [*module.parameters(), *module.buffers()]


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers that a module has itself."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
