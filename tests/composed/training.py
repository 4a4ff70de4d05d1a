"""A Flux transformer with frozen weights and a trainable adapter, and a step of training."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from . import adapters, models

#: Ways of gradient checkpointing: none, and the two that torch has.
CHECKPOINTS = ("none", "non-reentrant", "reentrant")


def build(weights: str = "plain", checkpointing: str = "none", blocks: int = 2) -> Any:
    """The model on the CPU, in training mode."""
    model = models.flux(weights, blocks=blocks).requires_grad_(False)
    adapters.add_to(model, "to_q", "to_k", "to_v", "proj_mlp")
    if checkpointing == "non-reentrant":
        model.enable_gradient_checkpointing()
    elif checkpointing == "reentrant":
        model.enable_gradient_checkpointing(lambda function, *args: checkpoint(function, *args, use_reentrant=True))
    return model.train()


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def loss(model: Any, device: torch.device, seed: int = 0) -> torch.Tensor:
    inputs = models.flux_inputs(device, seed)
    # Reentrant checkpointing takes part in a graph only through its inputs.
    inputs["hidden_states"].requires_grad_()
    output: torch.Tensor = model(**inputs, return_dict=False)[0]
    return output.float().pow(2).mean()


def backward(model: Any, device: torch.device, seed: int = 0, times: int = 2) -> list[float]:
    """The losses of a step with gradient accumulation; the gradients are added up in the parameters."""
    found = []
    for index in range(times):
        value = loss(model, device, seed + index)
        value.backward()  # type: ignore[no-untyped-call]
        found.append(value.item())
    return found
