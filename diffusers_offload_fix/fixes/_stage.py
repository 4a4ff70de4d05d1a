"""A stage on which upstream's own code plays with a stand-in accelerator, so that a probe leaves no trace.

The stage is a copy of the target module in which every function of upstream has been rebuilt over other globals:
`torch` is a stand-in whose accelerator only keeps a log. Nothing in the real module, in torch or on a device is
touched, and no accelerator is initialised. Code of this plugin never plays here: a probe answers False once the
plugin's functions are live. That these are right is shown by the tests on the simulated accelerator
(`tests/test_live_evidence.py` meets the bugs themselves, with and without the plugin), and by `tests/gpu` on a real
one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from diffusers_offload_fix import patcher
from diffusers_offload_fix.fixes._weights import Leaf, Weight

HOST = torch.device("cpu")
DEVICE = torch.device("cuda", 1)  # not the current one, which is 0


class Stream:
    """A stream of the stand-in accelerator. Whoever waits for it has waited for all that was queued on it."""

    def __init__(self, stage: Log, index: int = 0) -> None:
        self.stage, self.index = stage, index

    def synchronize(self) -> None:
        self.stage.pending = {leaf: stream for leaf, stream in self.stage.pending.items() if stream is not self}

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def record_event(self, event: Any = None) -> Any:
        return SimpleNamespace(wait=lambda *_: self.synchronize(), synchronize=self.synchronize)

    def wait_event(self, event: Any) -> None:
        event.synchronize()


@dataclass(frozen=True)
class Use:
    """A forward that used a weight: its module's name, where the data was, and whether its copy was still under way."""

    name: str
    device: torch.device
    is_raced: bool


@dataclass
class Log:
    """What happened on the stage."""

    pending: dict[Leaf, Stream] = field(default_factory=dict)
    copies: list[torch.device] = field(default_factory=list)
    recorded: list[object] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    current: Any = None

    def copied(self, leaf: Leaf, non_blocking: bool) -> None:
        self.copies.append(leaf.device)
        if non_blocking:
            self.pending[leaf] = self.current


class Accelerator:
    """The part of `torch.cuda` that upstream uses."""

    type = "cuda"

    def __init__(self, log: Log) -> None:
        self.log, self.index, self.default = log, 0, Stream(log)
        log.current = self.default

    def is_available(self) -> bool:
        return True

    def current_accelerator(self) -> Accelerator:
        return self

    def current_device(self) -> int:
        return self.index

    def current_stream(self, device: Any = None) -> Any:
        return self.log.current

    def Stream(self, device: Any = None, **kwargs: Any) -> Stream:
        index = self.index if device is None else torch.device(device).index or 0
        self.log.streams.append(Stream(self.log, index))
        return self.log.streams[-1]

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.log.current = self.log.current, stream
        try:
            yield
        finally:
            self.log.current = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.index = self.index, torch.device(device).index or 0
        try:
            yield
        finally:
            self.index = before

    def synchronize(self, device: Any = None) -> None:
        self.log.pending.clear()


class Torch:
    """torch, but for the accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.cuda = self.accelerator = accelerator
        self.Stream = accelerator.Stream

    def get_device_module(self, device: Any = None) -> Accelerator:
        return self.cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Block(torch.nn.Module):
    """A module whose forward only notes how it found its weights."""

    weight0: Any

    def __init__(self, log: Log, *weights: Any, name: str = "block") -> None:
        super().__init__()
        self.log, self.label = log, name
        for index, weight in enumerate(weights):
            is_parameter = isinstance(weight, torch.nn.Parameter)
            self.register_parameter(f"weight{index}", weight if is_parameter else parameter(weight))

    def forward(self) -> None:
        for weight in self.parameters(recurse=False):
            leaf = weight.leaf  # type: ignore[attr-defined]
            self.log.uses.append(Use(self.label, leaf.device, leaf in self.log.pending))
        for child in self.children():
            for block in child if isinstance(child, torch.nn.ModuleList) else [child]:
                block()


def parameter(weight: Any) -> Any:
    return torch.nn.Parameter(weight, requires_grad=False)


class Stage:
    """Upstream's module, rebuilt, and short ways to set a scene."""

    def __init__(self, upstream: ModuleType) -> None:
        self.log = Log()
        self.accelerator = Accelerator(self.log)
        self.module = _rebuilt(upstream, self.accelerator)

    def block(self, *weights: Any, name: str = "block") -> Block:
        return Block(self.log, *weights, name=name)

    def group(self, *modules: torch.nn.Module, stream: bool = False, **options: Any) -> Any:
        """A `ModuleGroup` of these modules."""
        return self.module.ModuleGroup(
            modules=list(modules),
            offload_device=HOST,
            onload_device=DEVICE,
            offload_leader=modules[-1],
            onload_leader=modules[0],
            stream=self.accelerator.Stream() if stream else None,
            **options,
        )

    def hook(self, group: Any) -> Any:
        """The hook of a group; its constructor differs between releases."""
        hook = self.module.GroupOffloadingHook
        if "config" in inspect.signature(hook.__init__).parameters:
            return hook(group, config=SimpleNamespace(exclude_kwargs=None))
        return hook(group)

    def round_trip(self, weight: Any, **options: Any) -> Any:
        """Onload and offload a block with this weight, and return the parameter."""
        block = self.block(weight)
        group = self.group(block, **options)
        group.onload_()
        group.offload_()
        return block.weight0

    def onloaded(self, weight: Any, **options: Any) -> Any:
        """Onload a block with this weight, and return the parameter."""
        block = self.block(weight)
        self.group(block, **options).onload_()
        return block.weight0

    def play(self, root: torch.nn.Module, passes: int = 1, **options: Any) -> list[Use]:
        """Offload a whole model with streams, run it, and return how its modules found their weights."""
        options = {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True, **options}
        self.module.apply_group_offloading(root, onload_device=DEVICE, **options)
        for _ in range(passes):
            root()
        return self.log.uses


def evidence(*paths: str) -> Callable[[Callable[[Stage], bool]], Any]:
    """Make a probe of a function that looks for the bug on a stage.

    The probe answers False once the plugin's own code is live at all of `paths`, where upstream's was.
    """

    def decorate(find: Callable[[Stage], bool]) -> Any:
        @wraps(find)
        def probe(module: ModuleType) -> bool:
            entries = [_entry(module, path) for path in paths]
            return not all(patcher.is_ours(entry) for entry in entries) and find(Stage(module))

        probe.upstream = lambda module: find(Stage(module))  # type: ignore[attr-defined]
        return probe

    return decorate


def _entry(module: ModuleType, path: str) -> Any:
    spot = patcher.locate(module, path)
    return None if spot is None else vars(spot[0]).get(spot[1])


def _rebuilt(upstream: ModuleType, accelerator: Accelerator) -> Any:
    namespace = dict(vars(upstream))
    for name, value in vars(upstream).items():
        if inspect.isclass(value) and value.__module__ == upstream.__name__ and not issubclass(value, Enum):
            namespace[name] = _class(value, upstream, namespace)
        else:
            namespace[name] = _function(patcher.original(upstream, name), upstream, namespace)
    namespace.update(
        torch=Torch(accelerator),
        TorchDeviceBackend=lambda device=None: accelerator,
        _is_torchao_tensor=lambda tensor: isinstance(tensor, Weight) and tensor.is_torchao,
        send_to_device=lambda tensors, *args, **kwargs: tensors,
        logger=logging.Logger(upstream.__name__, level=logging.CRITICAL + 1),
    )
    return SimpleNamespace(**namespace)


def _class(cls: type, upstream: ModuleType, namespace: dict[str, Any]) -> type:
    cell = CellType()  # what a method that says `super()` takes for its class
    attributes: dict[str, Any] = {}
    for name, live in vars(cls).items():
        entry = patcher.original(cls, name)
        is_added = entry is None and live is not None
        if not is_added and name not in ("__dict__", "__weakref__"):
            attributes[name] = _function(entry, upstream, namespace, cell)
    cell.cell_contents = type(cls.__name__, cls.__bases__, attributes)
    return cast(type, cell.cell_contents)


def _function(entry: Any, upstream: ModuleType, namespace: dict[str, Any], cell: Any = None) -> Any:
    """Upstream's function over the stage's globals; anything else as it is."""
    if isinstance(entry, staticmethod):
        return staticmethod(_function(entry.__func__, upstream, namespace, cell))
    function = entry
    # torch.compiler.disable's layer looks at the real torch.
    while inspect.isfunction(function) and function.__globals__.get("__name__", "").startswith("torch."):
        function = getattr(function, "__wrapped__", None)
    if not inspect.isfunction(function) or function.__globals__ is not vars(upstream):
        return entry
    code = function.__code__
    closure = [cell if name == "__class__" else old for name, old in zip(code.co_freevars, function.__closure__ or ())]
    rebuilt = FunctionType(code, namespace, function.__name__, function.__defaults__, tuple(closure))
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt
