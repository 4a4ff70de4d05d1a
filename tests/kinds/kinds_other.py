"""bitsandbytes, GGUF and DTensor: kinds whose tensors are plain storage, sit outside parameters, or follow a mesh."""

from __future__ import annotations

import importlib
import tempfile
import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .catalogue import Built, Device, Kind, Unavailable
from .models import Stack, build_stack


def replace_linears(model: nn.Module, swap: Callable[[nn.Linear], nn.Module]) -> None:
    """Put `swap(linear)` where each linear is."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, swap(child))


@cache
def _without_compiling() -> None:
    """Lets bitsandbytes' operators run as they are: it compiles them anew for each shape, which takes minutes and tests nothing."""
    operators: Any = importlib.import_module("bitsandbytes.backends.default.ops")
    for name, operator in list(vars(operators).items()):
        if isinstance(operator, types.FunctionType) and hasattr(operator, "__wrapped__"):
            setattr(operators, name, operator.__wrapped__)


def _bnb_4bit(linear: nn.Linear, quant_type: str, double: bool) -> nn.Module:
    import bitsandbytes as bnb

    _without_compiling()
    made = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        compress_statistics=double,
        quant_type=quant_type,
    )
    made.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=double, quant_type=quant_type, module=made
    )
    made.bias = linear.bias
    return made.eval()


def _bnb_8bit(linear: nn.Linear, threshold: float) -> nn.Module:
    import bitsandbytes as bnb

    has_bias = linear.bias is not None
    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=has_bias, has_fp16_weights=False, threshold=threshold)
    made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    made.bias = linear.bias
    return made.eval()


def _settle_8bit(model: Any, device: torch.device) -> None:
    """Bring the statistics along: `model.to` moves the data of an 8-bit weight, and leaves its CB and SCB behind."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(weight, "CB", None) is not None:
            weight.CB, weight.SCB = weight.data, weight.SCB.to(device)


def _bitsandbytes(name: str, swap: Callable[[nn.Linear], nn.Module], dtype: torch.dtype, *tags: str) -> Kind:
    def build(device: Device, seed: int) -> Built:
        # the library quantises inside `.to(device)`, also when the device is the CPU
        return build_stack(lambda: Stack(128), device, seed, dtype, finish=lambda model: replace_linears(model, swap))

    return Kind(
        f"bnb-{name}",
        "bitsandbytes",
        build,
        tags=frozenset({"outside", *tags}),
        needs=("bitsandbytes",),
        settle=_settle_8bit,
    )


def _gguf_swap(linear: nn.Linear, quant_type: str) -> nn.Module:
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType[quant_type]
    data = torch.from_numpy(gguf.quants.quantize(linear.weight.detach().float().numpy(), kind).copy())
    dtype = linear.weight.dtype
    made = GGUFLinear(linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype)
    made.weight = GGUFParameter(data, quant_type=kind)
    made.bias = linear.bias
    return made


def _gguf(quant_type: str) -> Kind:
    def build(device: Device, seed: int) -> Built:
        swap = partial(_gguf_swap, quant_type=quant_type)
        return build_stack(lambda: Stack(64), device, seed, torch.bfloat16, finish=lambda model: replace_linears(model, swap))

    needs = ("gguf", "accelerate", "diffusers.quantizers.gguf.utils")
    return Kind(f"gguf-{quant_type.lower()}", "diffusers", build, ("cpu",), needs=needs)


def _one_process() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        raise Unavailable("torch.distributed is not available")
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def _distribute(model: nn.Module, shard: bool) -> None:
    """Turn parameters, buffers and the input into DTensors of a mesh of one; the output comes back plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = init_device_mesh("cpu", (1,))
    placement = (Shard(0),) if shard else (Replicate(),)
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, placement)
            setattr(module, key, nn.Parameter(spread, requires_grad=False))
        for key, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[key] = distribute_tensor(buffer, mesh, placement)

    def wrap(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # from_local would move the input to the mesh's device type, which is not where the weights are
        x = args[0]
        spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(x.shape, x.stride(), x.dtype))
        return (DTensor(x, spec, requires_grad=False),)

    model.register_forward_pre_hook(wrap)
    model.register_forward_hook(lambda _, args, out: out.to_local())


def _dtensor(name: str, shard: bool) -> Kind:
    def build(device: Device, seed: int) -> Built:
        _one_process()
        return build_stack(device=device, seed=seed, quantise=partial(_distribute, shard=shard))

    tags = frozenset({"wrapper", "mesh"})
    return Kind(f"dtensor-{name}", "torch", build, ("cpu",), tags, ("torch.distributed.tensor",))


def kinds() -> Iterator[Kind]:
    """Yield the kinds of bitsandbytes, GGUF and DTensor."""
    half = torch.bfloat16
    yield _bitsandbytes("nf4", partial(_bnb_4bit, quant_type="nf4", double=False), half, "state")
    yield _bitsandbytes("nf4-double", partial(_bnb_4bit, quant_type="nf4", double=True), half, "state")
    yield _bitsandbytes("fp4", partial(_bnb_4bit, quant_type="fp4", double=False), half, "state")
    yield _bitsandbytes("int8", partial(_bnb_8bit, threshold=0.0), torch.float16, "state")
    yield _bitsandbytes("int8-outliers", partial(_bnb_8bit, threshold=3.0), torch.float16, "state")
    for quant_type in ("Q8_0", "Q4_0", "Q5_1", "BF16"):
        yield _gguf(quant_type)
    yield _dtensor("replicate", shard=False)
    yield _dtensor("shard", shard=True)
