"""Property tests: random tensors, however laid out and nested, travel through a layout and come back byte for byte."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_offload_fix.homes import Keep, make_home
from diffusers_offload_fix.layout import ALIGNMENT, Layout
from diffusers_offload_fix.tree import Tree, children, is_wrapper, twin
from tests.kinds.contract import read_bytes

CPU = torch.device("cpu")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Pair(torch.Tensor):
    """A wrapper of two tensors, which may be wrappers again, with a plain attribute."""

    one: torch.Tensor
    two: torch.Tensor
    tag: str

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor, tag: str = "pair") -> Pair:
        shape, strides = one.shape, one.stride()
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=one.dtype, device=one.device)

    def __init__(self, one: torch.Tensor, two: torch.Tensor, tag: str = "pair") -> None:
        self.one, self.two, self.tag = one, two, tag

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["one", "two"], self.tag

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], tag: str, size: Any, stride: Any) -> Pair:
        return cls(inner["one"], inner["two"], tag)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


@st.composite
def dense(draw: st.DrawFn) -> torch.Tensor:
    """A dense tensor of any dtype: empty, 0-dim, transposed, sliced with gaps, expanded, or a view into a larger storage."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = 1
    for size in shape:
        count *= size
    raw = torch.randint(0, 255, (count * dtype.itemsize + 64,), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    tensor = raw[16 : 16 + count * dtype.itemsize].view(dtype).view(shape)
    how = draw(st.sampled_from(("as is", "permuted", "gaps", "expanded")))
    if how == "permuted" and tensor.dim() > 1:
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    elif how == "gaps" and tensor.dim() and tensor.shape[0] > 1:
        tensor = tensor[::2]
    elif how == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


def nested() -> st.SearchStrategy[torch.Tensor]:
    """A dense tensor, or a wrapper of wrappers of dense tensors."""
    return st.recursive(dense(), lambda inner: st.builds(Pair, inner, inner), max_leaves=6)


@given(st.lists(dense(), max_size=6))
@settings(deadline=None, max_examples=150)
def test_a_home_gives_back_every_leaf(leaves: list[torch.Tensor]) -> None:
    wanted = [(leaf.dtype, leaf.shape, leaf.stride(), read_bytes(leaf)) for leaf in leaves]
    home = make_home(leaves, CPU, CPU, Keep.AS_IS)
    assert [(leaf.dtype, leaf.shape, leaf.stride(), read_bytes(leaf)) for leaf in home.leaves] == wanted


@given(st.lists(dense(), max_size=6), st.integers(1, 70))
@settings(deadline=None, max_examples=150)
def test_bytes_travel_in_chunks(leaves: list[torch.Tensor], chunk: int) -> None:
    wanted = [read_bytes(leaf) for leaf in leaves]
    home = make_home(leaves, CPU, CPU, Keep.AS_IS)
    memory = torch.zeros(home.layout.nbytes, dtype=torch.uint8)
    for start in range(0, len(memory), chunk):
        home.gather(memory[start : start + chunk], start)
    views = home.layout.views(home.layout.slices(memory))
    assert [read_bytes(view) for view in views] == wanted


@given(st.lists(dense(), max_size=6))
@settings(deadline=None, max_examples=150)
def test_a_layout_is_aligned_and_does_not_overlap(leaves: list[torch.Tensor]) -> None:
    layout = Layout(leaves)
    reach = 0
    for region in layout.regions:
        assert region.offset % ALIGNMENT == 0
        assert region.offset >= reach
        reach = region.offset + region.nbytes
    assert reach <= layout.nbytes


def test_leaves_that_share_memory_go_on_sharing_it() -> None:
    base = torch.arange(32, dtype=torch.float32)
    home = make_home([base, base[8:16], base.view(4, 8).t()], CPU, CPU, Keep.AS_IS)
    home.leaves[0][9] = -1
    assert home.leaves[1][1] == -1
    assert home.leaves[2][1, 1] == -1
    assert len(home.layout.regions) == 1


def test_neighbours_in_one_file_do_not_drag_each_other_along() -> None:
    file = torch.arange(1000, dtype=torch.float32)
    layout = Layout([file[:10], file[900:910]])
    assert len(layout.regions) == 2
    assert layout.nbytes == 2 * ALIGNMENT


@given(nested())
@settings(deadline=None, max_examples=100)
def test_a_tree_names_every_leaf_once(tensor: torch.Tensor) -> None:
    tree = Tree(tensor)

    def walk(part: torch.Tensor) -> list[int]:
        return [key for _, child in children(part) for key in walk(child)] if is_wrapper(part) else [id(part)]

    assert list(map(id, tree.leaves)) == walk(tensor)
    assert tree.intact()


@given(nested())
@settings(deadline=None, max_examples=100)
def test_a_twin_has_the_same_form_and_no_bytes(tensor: torch.Tensor) -> None:
    if not is_wrapper(tensor):
        return
    copy = twin(tensor, CPU)
    ours, theirs = Tree(tensor), Tree(copy)
    assert [type(w) for w in ours.wrappers] == [type(w) for w in theirs.wrappers]
    assert [w.shape for w in ours.wrappers] == [w.shape for w in theirs.wrappers]
    assert [leaf.dtype for leaf in ours.leaves] == [leaf.dtype for leaf in theirs.leaves]
    assert all(leaf.numel() == 0 for leaf in theirs.leaves)
    assert copy.tag == tensor.tag  # type: ignore[attr-defined]
    assert not set(map(id, ours.leaves)) & set(map(id, theirs.leaves))


def test_a_replaced_inner_tensor_is_noticed() -> None:
    pair = Pair(torch.zeros(2), torch.zeros(2))
    tree = Tree(pair)
    assert tree.intact()
    pair.two = torch.ones(2)
    assert not tree.intact()
