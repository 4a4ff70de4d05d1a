"""Taking a forward's inputs to the device of its group."""

from __future__ import annotations

from typing import Any

import torch

from .groups import GroupState


def send(inputs: Any, state: GroupState, excluded: Any = ()) -> Any:
    """`inputs` (nested tuples, lists and dictionaries) with every tensor on the group's device.

    What is there already is handed on as the same object: a list that a model fills while it runs (an autoencoder's feature cache)
    must stay the caller's own.

    Args:
        excluded: keys of `inputs` (a dictionary then) that are left alone.
    """
    if is_there(inputs, state.device):
        return inputs
    # Looked up late: accelerate is optional for diffusers, though not for group offloading.
    from accelerate.utils import send_to_device

    if type(inputs) is dict:
        return {name: value if name in excluded else send(value, state) for name, value in inputs.items()}
    if type(inputs) is tuple:
        return tuple(send(value, state) for value in inputs)
    return send_to_device(inputs, state.device, non_blocking=state.non_blocking)


def is_there(value: Any, device: torch.device) -> bool:
    """True if nothing in `value` has to be moved."""
    if isinstance(value, torch.Tensor):
        return value.device == device
    if isinstance(value, (list, tuple)):
        return all(is_there(item, device) for item in value)
    if isinstance(value, dict):
        return all(is_there(item, device) for item in value.values())
    return not hasattr(value, "to")
