"""The head of a file of weights: safetensors' own, with the leaves as plain tensors and a manifest of what they make up.

The manifest (JSON in `__metadata__`, under MANIFEST) lists every tensor: its class by name, and for each leaf its path inside the
tensor, dtype, shape, strides, the entry that holds its bytes, and the byte where it begins there. Nothing in it can be executed.
torchao's own safetensors support is no help here: it knows some of torchao's classes, of some releases, and no other library's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, Place
from .tree import Tree, children, is_wrapper

MANIFEST = "diffusers_offload_fix"

#: safetensors' names; bytes of any other dtype are an entry of plain bytes, and the manifest says what they are.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class Head:
    """Collects what a file holds, and makes its first bytes."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        self._tensors: list[dict[str, Any]] = []
        self._end = 0

    def add(self, prefix: str, layout: Layout, start: int, described: list[dict[str, Any]]) -> None:
        """Notes a layout whose bytes begin at `start`, counted from the end of the head; `described` as from `describe`."""
        names = [f"{prefix}.{index}" for index in range(len(layout.regions))]
        leaves = [leaf for tensor in described for leaf in tensor["leaves"]]
        for leaf, place in zip(leaves, layout.places):
            leaf |= {"entry": names[place.region], "offset": place.offset, "dtype": str(place.dtype).removeprefix("torch.")}
            leaf |= {"shape": list(place.shape), "stride": list(place.stride)}
        self._tensors += described
        lone = {place.region: place for place in layout.places if layout.regions[place.region].places == 1}
        for index, (name, region) in enumerate(zip(names, layout.regions)):
            self._fill(start + region.offset)
            self._entry(name, region.nbytes, *_form(lone.get(index), region.nbytes))
        self._fill(start + layout.nbytes)

    @property
    def end(self) -> int:
        """How many bytes follow the head."""
        return self._end

    def _fill(self, start: int) -> None:
        # safetensors allows no gaps: the bytes between two regions are an entry too.
        if start > self._end:
            self._entry(f"gap.{self._end}", start - self._end, "U8", [start - self._end])

    def _entry(self, name: str, nbytes: int, dtype: str, shape: list[int]) -> None:
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self._end, self._end + nbytes]}
        self._end += nbytes

    def dumps(self, nbytes: int) -> bytes:
        """The head in exactly `nbytes` bytes, filled up with spaces.

        Raises:
            ValueError: it is longer than that.
        """
        metadata = {"format": "pt", MANIFEST: json.dumps({"version": 1, "tensors": self._tensors}, separators=(",", ":"))}
        text = json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()
        if len(text) > nbytes - 8:
            raise ValueError(f"the head of {len(text)} bytes does not fit into {nbytes - 8}")
        return (nbytes - 8).to_bytes(8, "little") + text.ljust(nbytes - 8)


def _form(place: Place | None, nbytes: int) -> tuple[str, list[int]]:
    """The dtype and shape of an entry: those of its only leaf if that leaf is all of it, dense and in order, else plain bytes."""
    if place is None or place.nbytes != nbytes or place.dtype not in _DTYPES:
        return "U8", [nbytes]
    dense = tuple(torch.empty(place.shape, device="meta").stride()) == place.stride
    return (_DTYPES[place.dtype], list(place.shape)) if dense else ("U8", [nbytes])


def describe(tensor: Tensor, count: int) -> dict[str, Any]:
    """The class of a tensor and the paths of its `count` leaves, without their places."""
    kind = type(tensor)
    paths = list(_paths(tensor, ""))
    if len(paths) != count:
        # Some of the leaves hang in attributes, or in the tensor's module.
        tree = Tree(tensor)
        named = {id(inner): name for _, name, inner in tree.links}
        paths = [named.get(id(leaf), "") for leaf in tree.leaves]
        paths += [f"state.{index}" for index in range(len(paths), count)]
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "leaves": [{"path": path} for path in paths[:count]]}


def _paths(tensor: Tensor, prefix: str) -> Iterator[str]:
    if not is_wrapper(tensor):
        yield prefix
        return
    for name, child in children(tensor):
        yield from _paths(child, f"{prefix}.{name}" if prefix else name)
