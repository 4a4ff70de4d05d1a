"""torchao weights over its releases: version 1 and 2 classes, float8, int4 packings, intx, MX, NVFP4 and NF4.

Names and places of the configs change between releases; a builder looks them up when it runs and otherwise gives a
reason, so that one list serves every release.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .catalogue import Built, Device, Kind, Place, Unavailable
from .models import Stack, build_stack
from .own import linears

QUANTISATION = "torchao.quantization"
MX = "torchao.prototype.mx_formats"
OPAQUE = ("torchao.prototype.quantization.int4", "torchao.prototype.int4_opaque_tensor")
PACKING = "torchao.quantization.quantize_.workflows"


def find(name: str, *modules: str) -> Any:
    """Return `name` from the first of `modules` that has it, or raise `Unavailable`."""
    for module in modules or (QUANTISATION,):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise Unavailable(f"torchao {release()} has no {name}")


def release() -> str:
    """Return the installed torchao's version."""
    return str(importlib.import_module("torchao").__version__).split("+")[0]


def versioned(name: str, version: int, **options: Any) -> Any:
    """Build a config that makes version 1 or 2 tensors, or raise `Unavailable` where that version is gone."""
    config = find(name)
    parameters = inspect.signature(config).parameters
    if "version" in parameters:
        options["version"] = version
    elif version != 1:
        raise Unavailable(f"{name} of torchao {release()} makes version 1 only")
    return config(**options)


def _torchao(
    name: str,
    config: Callable[[], Any],
    *tags: str,
    after: Callable[[nn.Module], object] | None = None,
    width: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    quantised_on: tuple[Place, ...] = ("cpu", "accelerator"),
) -> Kind:
    def quantise(model: nn.Module) -> None:
        find("quantize_")(model, config())
        _must_have_quantised(model)
        if after is not None:
            after(model)

    def build(device: Device, seed: int) -> Built:
        return build_stack(lambda: Stack(width), device, seed, dtype, quantise=quantise)

    return Kind(f"torchao-{name}", "torchao", build, quantised_on, frozenset({"wrapper", *tags}), (QUANTISATION,))


def _must_have_quantised(model: nn.Module) -> None:
    if any(hasattr(linear.weight, "__tensor_flatten__") for linear in linears(model)):
        return
    raise Unavailable(f"torchao {release()} leaves every weight of this model as it is")


def _int8(version: int, dynamic: bool, **options: Any) -> Any:
    name = "Int8DynamicActivationInt8WeightConfig" if dynamic else "Int8WeightOnlyConfig"
    try:
        return versioned(name, version, **options)
    except Unavailable:
        if version != 1:
            raise
        return find("int8_dynamic_activation_int8_weight" if dynamic else "int8_weight_only")()


def _int8_layout(layout: str) -> Any:
    return versioned("Int8DynamicActivationInt8WeightConfig", 1, layout=find(layout, "torchao.dtypes")())


def _int4_packing(packing: str, **options: Any) -> Any:
    formats = find("Int4PackingFormat", f"{PACKING}.int4.int4_packing_format", f"{PACKING}.int4")
    try:
        chosen = formats(packing)
    except ValueError:
        raise Unavailable(f"torchao {release()} has no int4 packing {packing}") from None
    return versioned("Int4WeightOnlyConfig", 2, group_size=32, int4_packing_format=chosen, **options)


def _int4_layout(layout: str, group: int = 64, **options: Any) -> Any:
    made = find(layout, "torchao.dtypes")(**options)
    config = find("Int4WeightOnlyConfig")
    if "layout" not in inspect.signature(config).parameters:
        raise Unavailable(f"Int4WeightOnlyConfig of torchao {release()} takes no layout")
    return versioned("Int4WeightOnlyConfig", 1, group_size=group, layout=made)


def _intx(dtype: torch.dtype, group: int | None, packing: str | None = None) -> Any:
    granularity = find("PerAxis")(0) if group is None else find("PerGroup")(group)
    options: dict[str, Any] = {"weight_dtype": dtype, "granularity": granularity}
    if packing is not None:
        options["intx_packing_format"] = packing
    return versioned("IntxWeightOnlyConfig", 2, **options)


def _intx_dynamic(packing: str | None = None) -> Any:
    options: dict[str, Any] = {"weight_dtype": torch.int4, "weight_granularity": find("PerGroup")(32)}
    if packing is not None:
        options["intx_packing_format"] = packing
    return versioned("Int8DynamicActivationIntxWeightConfig", 2, **options)


def _uintx() -> Any:
    try:
        return find("UIntXWeightOnlyConfig")(torch.uint4, group_size=32)
    except Unavailable:
        return find("UIntxWeightOnlyConfig", "torchao.prototype.quantization.quant_api")(group_size=64)


def _mx(element: torch.dtype) -> Any:
    config = find("MXDynamicActivationMXWeightConfig", MX, f"{MX}.inference_workflow")
    emulated = find("KernelPreference", f"{QUANTISATION}.quantize_.common.kernel_preference").EMULATED
    parameters = inspect.signature(config).parameters
    if "kernel_preference" not in parameters:
        return config(activation_dtype=element, weight_dtype=element)
    return config(activation_dtype=element, weight_dtype=element, kernel_preference=emulated)


def _nvfp4(dynamic: bool) -> Any:
    name = "NVFP4DynamicActivationNVFP4WeightConfig" if dynamic else "NVFP4WeightOnlyConfig"
    config = find(name, MX, f"{MX}.inference_workflow")
    return config(use_triton_kernel=False) if dynamic else config()


def _smooth(model: nn.Module) -> None:
    """Give int8 weights the activation scale that SmoothQuant and AWQ leave on them."""
    for index, linear in enumerate(linears(model)):
        if not hasattr(linear.weight, "act_pre_scale"):
            raise Unavailable(f"int8 weights of torchao {release()} carry no act_pre_scale")
        steps = torch.arange(linear.in_features) % 7 + index % 3
        linear.weight.act_pre_scale = (0.5 + steps / 7).to(linear.weight.dtype).to(linear.weight.device)


def _float8_by_hand(device: Device, seed: int, granularity: str) -> Built:
    """Build float8 weights with dynamic activations as the config would; the config itself insists on a new GPU."""
    place = f"{PACKING}.float8.float8_tensor"
    tensor, kwargs = find("Float8Tensor", place), find("QuantizeTensorToFloat8Kwargs", place)
    chosen = find(granularity)()
    config = find("Float8MMConfig", "torchao.float8.inference")(use_fast_accum=True)

    def quantise(model: nn.Module) -> None:
        for linear in linears(model):
            weight = tensor.from_hp(
                linear.weight.detach(),
                granularity=chosen,
                mm_config=config,
                act_quant_kwargs=kwargs(granularity=chosen),
            )
            linear.weight = nn.Parameter(weight, requires_grad=False)

    # a weight of 128 by 128 would pass for a block-scaled one
    return build_stack(lambda: Stack(64), device, seed, torch.bfloat16, quantise=quantise)


def _nf4(device: Device, seed: int) -> Built:
    places = ("torchao.quantization", "torchao.dtypes.nf4tensor", "torchao.dtypes")
    tensor = find("NF4Tensor", *places)

    def quantise(model: nn.Module) -> None:
        for linear in linears(model):
            weight = tensor.from_tensor(linear.weight.detach(), 64, 256)
            linear.weight = nn.Parameter(weight, requires_grad=False)

    return build_stack(lambda: Stack(128), device, seed, torch.bfloat16, quantise=quantise)


def kinds() -> Iterator[Kind]:
    """Yield torchao's kinds."""
    yield _torchao("int8wo-v1", lambda: _int8(1, dynamic=False))
    yield _torchao("int8dq-v1", lambda: _int8(1, dynamic=True))
    yield _torchao("int8dq-semisparse", lambda: _int8_layout("SemiSparseLayout"))
    yield _torchao("int8wo", lambda: _int8(2, dynamic=False))
    yield _torchao("int8dq", lambda: _int8(2, dynamic=True))
    yield _torchao("int8wo-fp16", lambda: _int8(2, dynamic=False), dtype=torch.float16)
    yield _torchao("int8dq-smooth", lambda: _int8(2, dynamic=True), after=_smooth)
    yield _torchao("int8wo-smooth", lambda: _int8(2, dynamic=False), after=_smooth)
    yield _torchao("float8wo-v1", lambda: versioned("Float8WeightOnlyConfig", 1))
    yield _torchao("float8wo", lambda: versioned("Float8WeightOnlyConfig", 2))
    yield _torchao("float8dq-tensor", lambda: versioned("Float8DynamicActivationFloat8WeightConfig", 2), width=256)
    yield _torchao(
        "float8dq-row",
        lambda: versioned("Float8DynamicActivationFloat8WeightConfig", 2, granularity=find("PerRow")()),
        width=256,
    )
    for granularity in ("PerTensor", "PerRow"):
        yield Kind(
            f"torchao-float8dq-{granularity.removeprefix('Per').lower()}-by-hand",
            "torchao",
            partial(_float8_by_hand, granularity=granularity),
            tags=frozenset({"wrapper"}),
            needs=(QUANTISATION,),
        )
    for packing in ("plain", "plain_int32", "tile_packed_to_4d", "preshuffled", "marlin_sparse"):
        yield _torchao(f"int4-{packing.replace('_', '-')}", lambda packing=packing: _int4_packing(packing))
    yield _torchao("int4-tiled-v1", lambda: _int4_layout("TensorCoreTiledLayout", inner_k_tiles=8))
    yield _torchao("int4-marlin-v1", lambda: _int4_layout("MarlinSparseLayout", group=128), width=256, dtype=torch.float16)
    yield _torchao("int4dq-v1", lambda: find("Int8DynamicActivationInt4WeightConfig")(group_size=32))
    yield _torchao("int4-cpu-v1", lambda: _int4_layout("Int4CPULayout"), "refuses-accelerator", quantised_on=("cpu",))
    yield _torchao("int4-opaque", _opaque, "refuses-in-forward", quantised_on=("cpu",))
    yield _torchao("intx-int8", lambda: _intx(torch.int8, None))
    yield _torchao("intx-int4", lambda: _intx(torch.int4, 32))
    yield _torchao("intx-int3", lambda: _intx(torch.int3, 64))
    yield _torchao("intx-dynamic", _intx_dynamic)
    yield _torchao("intx-opaque", lambda: _intx_dynamic("opaque_aten_kleidiai"), "refuses-accelerator", quantised_on=("cpu",))
    yield _torchao("intx-opaque-lowbit", lambda: _intx_dynamic("opaque_torchao_auto"), "refuses-accelerator", quantised_on=("cpu",))
    yield _torchao("uint4", _uintx)
    yield _torchao("fp6", lambda: find("FPXWeightOnlyConfig")(3, 2), dtype=torch.float16)
    yield _torchao("mxfp8", lambda: _mx(torch.float8_e4m3fn))
    yield _torchao("mxfp4", lambda: _mx(torch.float4_e2m1fn_x2))
    yield _torchao("nvfp4wo", lambda: _nvfp4(dynamic=False))
    yield _torchao("nvfp4dq", lambda: _nvfp4(dynamic=True))
    yield Kind("torchao-nf4", "torchao", _nf4, tags=frozenset({"wrapper"}), needs=(QUANTISATION,))


def _opaque() -> Any:
    for name in ("PrototypeInt4WeightOnlyConfig", "Int4WeightOnlyOpaqueTensorConfig"):
        try:
            return find(name, *OPAQUE)(group_size=64)
        except Unavailable:
            continue
    raise Unavailable(f"torchao {release()} has no opaque int4 tensor")
