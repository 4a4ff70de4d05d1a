"""The rules of the simulated accelerator: what a correct program sees, and what an incorrect one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import sim
from tests.sim.helpers import at_rest  # noqa: F401 -- a fixture

sim.load()
npu = torch.get_device_module("npu")


# Device --------------------------------------------------------------------------------------------------------------


def test_is_the_accelerator_of_this_process() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.is_available()
    assert npu.device_count() == torch.accelerator.device_count() == 2


def test_loads_once() -> None:
    sim.load()
    assert torch.get_device_module("npu") is npu


def test_two_devices_with_a_current_one() -> None:
    assert torch.empty(1, device="npu").device == torch.device("npu:0")
    with npu.device(1):
        assert torch.empty(1, device="npu").device == torch.device("npu:1")
        assert npu.Stream().device == torch.device("npu:1")
    assert npu.current_device() == 0
    npu.set_device("npu:1")
    assert torch.empty(1, device="npu").device == torch.device("npu:1")


def test_there_is_no_third_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="npu:2")


def test_copies_between_devices() -> None:
    a = torch.arange(4.0, device="npu:0")
    assert a.to("npu:1").tolist() == [0, 1, 2, 3]
    assert sim.counters()["d2d"] == 1
    assert sim.hazards() == []


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
@pytest.mark.parametrize("op", [torch.add, torch.mm, torch.nn.functional.linear])
def test_mixed_devices_raise(op: Callable[..., torch.Tensor], other: str) -> None:
    here, there = torch.ones(2, 2, device="npu:0"), torch.ones(2, 2, device=other)
    for pair in ((here, there), (there, here)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found"):
            op(*pair)


def test_cpu_scalars_mix() -> None:
    assert (torch.ones(2, device="npu") + torch.tensor(1.0)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="npu:0") + torch.tensor(1.0, device="npu:1")


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(5, device="npu").isnan().all()
    assert torch.empty(5, pin_memory=True).isnan().all()


def test_freed_memory_is_nan_and_its_use_is_reported() -> None:
    owner = torch.ones(4, device="npu")
    storage: Any = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), torch.device("npu:0"), 16)
    stale = torch.empty(0, device="npu").set_(storage, 0, (4,), (1,))
    assert stale.tolist() == [1, 1, 1, 1]
    del owner
    assert stale.isnan().all()
    assert any(h.startswith("use after free") for h in sim.hazards())


def test_results_equal_the_cpu() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
    x = torch.randn(3, 16)
    expected = net(x)
    expected.sum().backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net.to("npu")
    result = net(x.to("npu"))
    result.sum().backward()
    assert torch.equal(result.cpu(), expected)
    assert all(torch.equal(p.grad.cpu(), g) for p, g in zip(net.parameters(), grads, strict=True) if p.grad is not None)


def test_attention_and_convolution_equal_the_cpu() -> None:
    q = torch.randn(1, 2, 64, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    conv, image = torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        device_q = q.to("npu")
        assert torch.equal(attend(device_q, device_q, device_q).cpu(), attend(q, q, q))
        expected = conv(image)
        assert torch.equal(conv.to("npu")(image.to("npu")).cpu(), expected)


def test_int8_and_float8_products() -> None:
    a = torch.randint(-9, 9, (32, 32), dtype=torch.int8)
    assert torch.equal(torch._int_mm(a.to("npu"), a.to("npu")).cpu(), torch._int_mm(a, a))
    f = torch.randn(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())

    def product(device: str) -> torch.Tensor:
        a, b, scale = f.to(device), f.t().to(device), one.to(device)
        return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16).cpu()

    assert torch.equal(product("npu"), product("cpu"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles(backend: str) -> None:
    torch._dynamo.reset()
    net, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with torch.no_grad():
        expected = net(x)
        assert torch.equal(torch.compile(net.to("npu"), backend=backend)(x.to("npu")).cpu(), expected)


def test_data_setter_and_swap_cross_devices() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    for device in ("npu:0", "npu:1", "cpu"):
        p.data = torch.zeros(3, device=device)
        assert p.device == torch.device(device)
    q = torch.nn.Parameter(torch.ones(3, device="npu"))
    torch.utils.swap_tensors(p, q)  # type: ignore[no-untyped-call]
    assert p.device.type == "npu" and q.device.type == "cpu"
