"""How files are read: every byte once, in whole loads, with what was written since from memory, through few pinned buffers."""

from __future__ import annotations

import collections
import copy
import itertools
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from diffusers_offload_fix import disk, files, idle, pages, staging
from tests import sim
from tests.kinds import KINDS, contract
from tests.pairs import forward, make
from tests.test_disk import enable, units


def test_d8_every_byte_is_read_once_in_a_forward(npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(make("plain-bfloat16"), npu, tmp_path, use_stream=True)
    example = KINDS["plain-bfloat16"].build()[1].to(npu)
    read: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        done = real(fd, buffers, offset, flags)
        read.append((offset, done))
        return done

    monkeypatch.setattr(os, "preadv", preadv)
    forwards = 4
    with idle.loop():
        for _ in range(forwards):
            forward(model, example)
    times = collections.Counter(offset for offset, _ in read)
    assert len(times) > 4
    # The root's weights stay on the device for the whole loop; what comes next is read ahead, of a forward that never comes too.
    assert set(times.values()) <= {1, forwards, forwards + 1}
    pieces = sorted(set(read))
    assert all(offset + nbytes <= after for (offset, nbytes), (after, _) in itertools.pairwise(pieces))
    blocks = sum(leaf.nbytes for tensor in model.blocks.parameters() for _, leaf in contract.leaves(tensor))
    assert blocks <= sum(nbytes for offset, nbytes in pieces if times[offset] > 1)


@pytest.mark.parametrize("level", ("block_level", "leaf_level"))
def test_a_drive_is_asked_for_a_whole_load_while_another_is_read(
    level: str, npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable(make("plain-bfloat16"), npu, tmp_path, use_stream=True, offload_type=level)
    example = KINDS["plain-bfloat16"].build()[1].to(npu)
    at_a_time, most, offsets, lock = 0, [], [], threading.Lock()
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        nonlocal at_a_time
        with lock:
            at_a_time += 1
            most.append(at_a_time)
            offsets.append(offset)
        try:
            time.sleep(0.005)
            return real(fd, buffers, offset, flags)
        finally:
            with lock:
                at_a_time -= 1

    monkeypatch.setattr(disk, "PART", disk.PAGE)
    monkeypatch.setattr(os, "preadv", preadv)
    calls = {}
    for cached in (False, True):
        monkeypatch.setattr(pages, "cached", lambda *_, cached=cached: cached)
        forward(model, example)
        most.clear()
        offsets.clear()
        forward(model, example)
        calls[cached] = len(offsets)
        assert len(set(offsets)) == len(offsets)
        if not cached:
            assert max(most) == staging.READERS
    homes = {id(unit.home): unit.home for unit in units(model)}.values()
    chunk = max(ring.chunk for unit in units(model) for ring in unit.lane.transfer._rings.values())
    assert calls[False] == sum(-(-home.layout.nbytes // chunk) for home in homes) < calls[True]


def test_memory_is_only_taken_by_what_is_written(npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are written are read from memory; a unit of which much was written goes to a new file."""
    block = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(2)]).requires_grad_(False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    resident, net = copy.deepcopy(Net()).to(npu), Net()
    enable(net, npu, tmp_path, use_stream=True)
    example = torch.linspace(-1, 1, 4096, device=npu).reshape(4, 1024)
    assert torch.equal(forward(net, example), forward(resident, example))
    first = units(net)[0].home
    assert private(net) == [0, 0]
    for rows in (1, 1024):
        for model in (net, resident):
            model.blocks[0].weight.data[:rows].mul_(1.5)
        for _ in range(3):
            assert torch.equal(forward(net, example), forward(resident, example))
        if rows == 1:
            assert units(net)[0].home is first
            assert private(net) == [4096, 0]
    assert units(net)[0].home is not first
    assert private(net) == [0, 0]


def test_what_was_written_counts_once_whatever_the_size_of_pieces(npu: torch.device, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(1024, 1024, bias=False)).requires_grad_(False)
    enable(net, npu, tmp_path, use_stream=True, offload_type="leaf_level")
    (unit,) = units(net)
    rows, total = 192, unit.home.layout.nbytes
    net[0].weight.data[300 : 300 + rows].mul_(1.5)
    assert rows * 4096 < files.WORN_BYTES < 2 * rows * 4096
    target = torch.empty(total, dtype=torch.uint8)
    for size in (total // 4, total, 3 * total // 16 // disk.PAGE * disk.PAGE):
        for start in range(0, total, size):
            unit.home.gather(target[start : start + size], start)
            assert not unit.home.worn
        assert torch.equal(target.view(torch.float32).view(1024, 1024), net[0].weight)
    net[0].weight.data[700 : 700 + rows].mul_(1.5)
    for start in range(0, total, total // 4):
        unit.home.gather(target[start : start + total // 4], start)
    assert unit.home.worn


def private(model: nn.Module) -> list[int]:
    """Bytes of memory that each unit's host leaves take by themselves."""
    found = []
    for unit in units(model):
        ranges = pages.written(unit.home.slab.data_ptr(), unit.home.layout.nbytes)
        assert ranges is not None
        found.append(sum(end - start for start, end in ranges))
    return found


def test_pinned_memory_is_three_chunks(npu: torch.device, tmp_path: Path) -> None:
    sim.reset_counters()
    model = enable(make("plain-bfloat16"), npu, tmp_path, use_stream=True)
    before = sim.counters()["pinned_bytes"]
    forward(model, KINDS["plain-bfloat16"].build()[1].to(npu))
    largest = max(unit.nbytes for unit in units(model))
    assert sim.counters()["pinned_bytes"] - before <= staging.WORKERS * largest
