"""Training through offloaded weights (T1): what autograd saves of a weight is a note of where to find it again.

While a group runs and a graph is recorded, tensors that lie in the group's device memory are saved as notes, so that the graph keeps
no weight on the device. When the backward pass asks for one, its group's bytes are copied to the device again; a few groups stay
there, until the backward pass ends. Everything else goes to the hooks that were there before, so that gradient checkpointing works.

A trainable parameter that is offloaded rests on the host, and its gradient is brought there: an optimiser sees both on one device.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backend
from .groups import GroupState, quiet
from .tree import Tree, is_wrapper, twin
from .unit import Entry, Unit
from .watch import versions

#: Groups that the backward pass keeps on the device: the one that it is in, and the one that is being recomputed.
KEPT = 2

CHANGED = (
    "A weight that the backward pass needs has changed since the forward pass, or its module has: {what}. Run the forward pass again "
    "after changing weights, loading adapters or enabling offloading."
)

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

_local = threading.local()
#: Units on the device that a graph may save from, by their storage; an entry may be out of date and is checked.
_bound: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
_ranges: weakref.WeakKeyDictionary[Unit, tuple[Any, tuple[list[int], list[list[Tensor]]]]] = weakref.WeakKeyDictionary()
_gradients: weakref.WeakKeyDictionary[Entry, Any] = weakref.WeakKeyDictionary()


class Note:
    """Where a tensor lies in its unit's device memory: `offset` in bytes, shape and strides in elements."""

    __slots__ = ("counted", "layout", "offset", "shape", "stamp", "stride", "type", "unit")

    def __init__(self, tensor: Tensor, unit: Unit) -> None:
        start = unit.slot.memory.storage_offset()
        self.unit, self.layout = unit, unit.home.layout
        self.offset = tensor.storage_offset() * tensor.element_size() - start
        self.type, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.counted = _counted_at(unit, self.offset)
        self.stamp = versions(self.counted)

    def tensor(self) -> Tensor:
        """The tensor on the device, copied there again if need be.

        Raises:
            RuntimeError: the weight or its module has changed since.
        """
        if versions(self.counted) != self.stamp:
            raise RuntimeError(CHANGED.format(what=f"a tensor of shape {tuple(self.shape)} was changed in place"))
        memory = returned(self.unit, self.layout)
        start = (memory.storage_offset() + self.offset) // self.type.itemsize
        view = torch.empty(0, dtype=self.type, device=memory.device)
        return view.set_(memory.untyped_storage(), start, self.shape, self.stride)


class WrappedNote:
    """A wrapper some of whose inner tensors are notes; `form` is the wrapper without any bytes."""

    __slots__ = ("form", "leaves")

    def __init__(self, form: Tensor, leaves: list[Any]) -> None:
        self.form, self.leaves = form, leaves

    def tensor(self) -> Tensor:
        """The wrapper on the device."""
        whole = twin(self.form, self.form.device)
        for leaf, value in zip(Tree(whole).leaves, self.leaves):
            leaf.data = value.tensor() if isinstance(value, Note) else value
        return whole


def makes_graph(state: GroupState, inputs: list[Any]) -> bool:
    """True if autograd may save weights of this group: one under it is trainable, or what comes in has a history."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        return True
    if any(parameter.requires_grad for module in (*state.modules, state.leader) for parameter in module.parameters()):
        return True
    return any(entry.tensor.requires_grad for unit in state.units for entry in unit.entries)


def refusal(state: GroupState) -> str | None:
    """Why no backward pass can go through this group, or None."""
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        return f"torch {torch.__version__} does not tell which hooks for saved tensors are in use; a newer one does"
    reason = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if reason is not None:
        return f"hooks for saved tensors are disabled: {reason}"
    for unit in state.units:
        if unit.slot is not None and unit.slot.key is not None:
            return "another group, whose forward records no graph, has brought its weights to memory that will be used again"
        for entry in unit.entries:
            if entry.binding is not None and not entry.binding.noted:
                return (
                    f"{type(entry.tensor).__name__} keeps tensors that autograd does not see, and looks for them in its backward pass"
                )
    return None


def begin(state: GroupState) -> None:
    """Before a module of the group runs with gradients enabled: from here on, its weights are saved as notes."""
    stack = _stack()
    stack.append(False)
    for kept in _returned.values():
        kept.settle()
    if state.graph and refusal(state) is None:
        with quiet():
            for unit in state.units:
                _bound[unit.slot.memory.untyped_storage()._cdata] = unit
                _keep_if_in_backward(unit)
                for entry in unit.entries:
                    _bring_gradient_home(entry, unit)
        torch._C._autograd._push_saved_tensors_default_hooks(*_hooks())
        stack[-1] = True


def end() -> None:
    """After a module for which `begin` was called, whether it raised or not."""
    stack = _stack()
    if stack and stack.pop():
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _stack() -> list[bool]:
    found: list[bool] | None = getattr(_local, "stack", None)
    if found is None:
        found = _local.stack = []
    return found


def _hooks() -> tuple[Pack, Unpack]:
    outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_same, _same)

    def pack(tensor: Tensor) -> Any:
        note = _note(tensor)
        return outer_pack(tensor) if note is None else note

    def unpack(value: Any) -> Tensor:
        if not isinstance(value, (Note, WrappedNote)):
            return outer_unpack(value)
        with quiet():
            return value.tensor()

    return pack, unpack


def _same(value: Any) -> Any:
    return value


def _note(tensor: Tensor) -> Note | WrappedNote | None:
    if not is_wrapper(tensor):
        unit = _unit_of(tensor)
        return None if unit is None else Note(tensor, unit)
    with quiet():
        leaves = [_note(leaf) for leaf in Tree(tensor).leaves]
        if all(leaf is None for leaf in leaves):
            return None
        values = [leaf.data if note is None else note for leaf, note in zip(Tree(tensor).leaves, leaves)]
        return WrappedNote(twin(tensor, tensor.device), values)


def _unit_of(tensor: Tensor) -> Unit | None:
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    where = tensor.untyped_storage()._cdata
    unit = _bound.get(where)
    # A storage may have gone, and another one come to the same address.
    if unit is None or not unit.bound or unit.slot.memory.untyped_storage()._cdata != where:
        return None
    return unit


def _counted_at(unit: Unit, offset: int) -> list[Tensor]:
    """The tensors whose change counters tell of the byte at `offset` in the unit's device memory."""
    found = _ranges.get(unit)
    if found is None or found[0] is not unit.home.layout:
        found = _ranges[unit] = unit.home.layout, unit.ranges()
    starts, tensors = found[1]
    return tensors[max(0, bisect.bisect_right(starts, offset) - 1)]


class Returned:
    """Units of one device whose bytes a backward pass has brought back, the latest last."""

    def __init__(self, device: torch.device) -> None:
        self._streams = backend.Streams(device) if backend.has_streams(device) else None
        self._task = -1
        # Weakly: after a backward pass that raised, nobody comes to let go of them, and they must not keep a model alive.
        self._kept: OrderedDict[weakref.ref[Unit], tuple[Tensor, Any, Any]] = OrderedDict()
        self._lanes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    def get(self, unit: Unit) -> Tensor | None:
        """The unit's device memory if this backward pass has it, in order with the current stream."""
        with self._lock:
            self._enter()
            found = self._kept.get(weakref.ref(unit))
        if found is None:
            return None
        memory, event, stream = found
        current: Any = self._streams.current() if self._streams is not None else None
        if event is not None and current != stream:
            current.wait_event(event)
            memory.record_stream(current)
        return memory

    def put(self, unit: Unit, memory: Tensor) -> None:
        """Keeps memory that the current stream has just filled, and lets go of the oldest."""
        event = stream = None
        if self._streams is not None:
            stream = self._streams.current()
            event = self._streams.mark(stream)
        with self._lock:
            self._enter()
            self._lanes.add(unit.lane)
            key = weakref.ref(unit, self._forget)
            self._kept[key] = memory, event, stream
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                _, (_, event, _) = self._kept.popitem(last=False)
                self._finish(event)

    def _enter(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            # What a backward pass that raised has left behind is not to be used again.
            self._clear()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        with self._lock:
            self._clear()
            self._task = -1
            lanes = list(self._lanes)
            self._lanes.clear()
        for lane in lanes:
            # A forward that was recomputed ends here, wherever in the model it stopped.
            with quiet(), lane.lock:
                if not lane.active:
                    lane.order.edge()
                    lane.finish()

    def _forget(self, key: weakref.ref[Unit]) -> None:
        self._kept.pop(key, None)

    def settle(self) -> None:
        """Lets go of what a backward pass that raised has left behind."""
        with self._lock:
            if self._task not in (-1, torch._C._current_graph_task_id()):
                self._clear()
                self._task = -1

    def _clear(self) -> None:
        for _, event, _ in self._kept.values():
            self._finish(event)
        self._kept.clear()

    @staticmethod
    def _finish(event: Any) -> None:
        # An optimiser may change the weights next: not under a copy that still reads them.
        if event is not None and not event.query():
            event.synchronize()


_returned: dict[torch.device, Returned] = {}


def returned(unit: Unit, layout: Any) -> Tensor:
    """The unit's device memory, a 1-d uint8 tensor laid out as `layout`; for the current stream.

    Raises:
        RuntimeError: the unit's tensors are others now, or lie elsewhere.
    """
    if unit.bound and unit.home.layout is layout:
        memory: Tensor = unit.slot.memory
        return memory
    if torch._C._current_graph_task_id() == -1:
        return _loaded(unit, layout, wait=True)
    kept = _returned.setdefault(unit.device, Returned(unit.device))
    found = kept.get(unit)
    if found is None:
        found = _loaded(unit, layout, wait=False)
        kept.put(unit, found)
    return found


def _loaded(unit: Unit, layout: Any, wait: bool) -> Tensor:
    if not unit.intact() or unit.home.layout is not layout:
        raise RuntimeError(CHANGED.format(what="tensors were replaced"))
    memory = torch.empty(layout.device_nbytes, dtype=torch.uint8, device=unit.device)
    unit.home.copy_to(memory, non_blocking=unit.home.pinned and not wait)
    return memory


def _keep_if_in_backward(unit: Unit) -> None:
    """A unit that is on the device because its forward is being recomputed is about to be asked for."""
    if torch._C._current_graph_task_id() != -1:
        _returned.setdefault(unit.device, Returned(unit.device)).put(unit, unit.slot.memory)


def _bring_gradient_home(entry: Entry, unit: Unit) -> None:
    """Sees to it that the gradient of a trainable parameter is on the host whenever the parameter is."""
    tensor = entry.tensor
    if not tensor.requires_grad or not tensor.is_leaf:
        return
    _move_gradient(tensor, unit.offload_device)
    if entry not in _gradients:
        _gradients[entry] = _follow(weakref.ref(entry), unit.device, unit.offload_device, tensor)
        for hook in _gradients[entry]:
            weakref.finalize(entry, hook.remove).atexit = False


def _follow(entry: weakref.ref[Entry], device: torch.device, home: torch.device, tensor: Tensor) -> list[Any]:
    # Gradients add up on the device, as they do for a resident model; a hook may not hand on one of another device.
    def before(gradient: Tensor) -> None:
        found = entry()
        if found is not None:
            _move_gradient(found.tensor, gradient.device)

    def after(parameter: Tensor) -> None:
        # Wherever the parameter is: its group may be there for a forward that is recomputed.
        if parameter.grad is not None and parameter.grad.device == device:
            _move_gradient(parameter, home)

    added: list[Any] = [tensor.register_hook(before)]  # type: ignore[no-untyped-call]
    added.append(tensor.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
    return added


def _move_gradient(tensor: Tensor, device: torch.device) -> None:
    if tensor.grad is not None and tensor.grad.device != device:
        tensor.grad.data = tensor.grad.data.to(device)
