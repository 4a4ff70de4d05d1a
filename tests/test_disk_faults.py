"""What goes wrong with disks and processes: an error that says what to do, or the weights stay in memory; none is ever lost."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import python
from torch import nn

from diffusers_offload_fix import disk, files, groups
from diffusers_offload_fix.disk import DiskError
from tests import cells, sim, simulated
from tests.kinds import KINDS, contract
from tests.pairs import Pair, every, forward, make, require
from tests.test_disk import ALL_EDITS, enable

WAYS = ("block+disk", "leaf+stream+disk")
NAMES = ("plain-bfloat16", "plain-tied-root", "torchao-int8wo", "own-repack-class")


def failing(number: int, after: int = 0, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A system call that fails, the first few times excepted."""
    left = [after]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0] and real is not None:
            left[0] -= 1
            return real(*args, **kwargs)
        raise OSError(number, os.strerror(number))

    return call


def refused(model: nn.Module, npu: torch.device, folder: Path, way: str, words: str) -> DiskError:
    """Enables, which must fail with these words, and leave every weight and an ordinary model."""
    wanted, ids, opened = contract.fingerprint(model), contract.snapshot_ids(model), set(disk.files())
    mode = cells.DISK_MODES[way]
    with pytest.raises(DiskError, match=words) as caught:
        simulated.enable(model, npu, mode, offload_to_disk_path=str(folder))
    assert repr(str(folder)) in str(caught.value) and str(caught.value).endswith(".")
    assert contract.diff(wanted, contract.fingerprint(model)) == []
    assert contract.snapshot_ids(model) == ids
    assert not any(groups.group_hooks(module) for module in model.modules())
    assert not any("forward" in vars(module) and "hook" in repr(module.forward) for module in model.modules())
    gc.collect()
    assert set(disk.files()) == opened
    assert not folder.is_dir() or list(folder.iterdir()) == []
    return caught.value


def works(model: nn.Module, name: str, npu: torch.device, folder: Path, way: str) -> None:
    """The same model can be offloaded once the fault is gone."""
    simulated.enable(model, npu, cells.DISK_MODES[way], offload_to_disk_path=str(folder))
    resident, example = KINDS[name].resident(npu)
    for _ in range(2):
        assert torch.equal(forward(model, example.to(npu)), forward(resident, example.to(npu)))


CALLS = {
    "reserve": ("posix_fallocate", errno.ENOSPC, 0, "no room for the weights.*bytes are needed.*free there"),
    "quota": ("posix_fallocate", errno.EDQUOT, 0, "no room for the weights.*Free some space"),
    "grow": ("posix_fallocate", errno.ENOSPC, 2, "no room for the weights"),
    "write": ("pwrite", errno.ENOSPC, 3, "could not be written.*Free some space"),
    "device": ("pwrite", errno.EIO, 3, "could not be written.*Choose another folder"),
    "flush": ("fsync", errno.EIO, 0, "could not be written"),
}


@every(("name", NAMES), ("call", tuple(CALLS)))
def test_a_disk_that_fails_while_it_is_written(
    name: str, call: str, npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(name, npu)
    function, number, after, words = CALLS[call]
    way = WAYS[len(call) % 2]
    model = make(name)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(number, after, getattr(os, function)))
        assert refused(model, npu, tmp_path / "x", way, words).errno == number
    works(model, name, npu, tmp_path / "x", way)


@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_is_really_full(way: str, npu: torch.device, tmp_path: Path) -> None:
    model = make("plain-bfloat16")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        refused(model, npu, tmp_path / "x", way, "no room for the weights.*lift the limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    works(model, "plain-bfloat16", npu, tmp_path / "x", way)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_folder_that_may_not_be_written_to(number: int, npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("plain-bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", failing(number))
        refused(model, npu, tmp_path, "block+disk", "no file can be made there.*may write to")
    works(model, "plain-bfloat16", npu, tmp_path, "block+disk")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_really_may_not_be_written_to(npu: torch.device, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir(mode=0o500)
    refused(make("plain-bfloat16"), npu, tmp_path / "x", "leaf+stream+disk", "Permission denied.*may write to")


def test_a_path_that_is_no_folder(npu: torch.device, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    refused(make("plain-bfloat16"), npu, tmp_path / "x", "block+disk", "File exists")
    assert (tmp_path / "x").read_text() == "mine"


def test_a_symbolic_link_of_another_user(npu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    mine = make("plain-bfloat16")
    enable(mine, npu, tmp_path / "link")
    monkeypatch.setattr(disk, "user_id", lambda: os.geteuid() + 1)
    real = os.lstat

    def lstat(path: str) -> Any:
        found = real(path)
        return os.stat_result([*found[:4], os.geteuid() + 7, *found[5:]]) if stat.S_ISLNK(found.st_mode) else found

    monkeypatch.setattr(os, "lstat", lstat)
    for folder in (tmp_path / "link", tmp_path / "link" / "below"):
        error = refused(make("plain-bfloat16"), npu, folder, "block+disk", "symbolic link of another user")
        assert error.errno == errno.EPERM and str(tmp_path / "link") in str(error)
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_done_to_the_folder_between_two_forwards(way: str, npu: torch.device, tmp_path: Path) -> None:
    """There is no file that could be deleted, truncated or altered; the folder itself is made again when it is needed."""
    pair = Pair("plain-bfloat16", way, npu)
    assert os.listdir(cells.FOLDER) == []
    shutil.rmtree(cells.FOLDER)
    pair.check(2)
    reference = make("plain-bfloat16")
    for model in (pair.model, reference):
        model.load_state_dict(make("plain-bfloat16", seed=1).state_dict())
        model.to(torch.float32)
    pair.example = pair.example.float()
    pair.expect(reference)
    pair.check(3)
    assert os.listdir(cells.FOLDER) == []


@every(("name", NAMES), ("way", WAYS))
def test_a_drive_that_does_not_give_the_bytes_back(name: str, way: str, npu: torch.device) -> None:
    """No bus error and no wrong number; what the drive has again is used again."""
    known = set(disk.files())
    pair = Pair(name, way, npu)
    (file,) = set(disk.files()) - known
    pair.check(1)
    assert file.fd is not None
    whole = os.pread(file.fd, os.fstat(file.fd).st_size, 0)
    os.ftruncate(file.fd, len(whole) // 2 // disk.PAGE * disk.PAGE)
    for _ in range(2):
        with pytest.raises(DiskError, match="could not be read back: the file ends at byte"):
            forward(pair.model, pair.example)
        # Reading the leaves would be a bus error now, but they are all on the host.
        assert {p.device.type for p in pair.model.parameters()} == {"cpu"}
    os.pwrite(file.fd, whole, 0)
    pair.check(2)
    assert contract.same_state_dict_bytes(pair.model.state_dict(), make(name).state_dict()) == []


@every(("way", WAYS), ("edit", ("load", "data", "untold", "parameter")))
def test_a_disk_that_is_full_when_changed_weights_are_written(
    way: str, edit: str, npu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They stay in memory, with one warning, and count."""
    pair = Pair("plain-bfloat16", way, npu)
    pair.check(1)
    monkeypatch.setattr(files, "WORN_BYTES", 0)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    reference, other = make("plain-bfloat16"), make("plain-bfloat16", seed=1)
    ALL_EDITS[edit](reference, make("plain-bfloat16", seed=1))
    ALL_EDITS[edit](pair.model, other)
    wanted = {key: value.clone() for key, value in reference.state_dict().items()}
    pair.expect(reference)
    with caplog.at_level(logging.WARNING, "diffusers_offload_fix"):
        pair.check(4)
    messages = {record.getMessage() for record in caplog.records}
    assert len(messages) == 1 and "stay in memory" in messages.pop()
    assert contract.same_state_dict_bytes(pair.model.state_dict(), wanted) == []


SCENES = """
import faulthandler, gc, os, resource, signal, sys
from tests import sim
sim.load()
import torch
from torch import nn
import diffusers_offload_fix
from diffusers.hooks import apply_group_offloading
from diffusers_offload_fix import disk

scene, folder = sys.argv[1:]

class Net(nn.Module):
    def __init__(self, count, size, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Linear(size, size) for _ in range(count)])

    @torch.no_grad()
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def pair(count=4, size=16, seed=0, **options):
    net = Net(count, size, seed)
    options = {"offload_type": "leaf_level", "use_stream": True, "offload_to_disk_path": folder, **options}
    with sim.xpu_shim():
        apply_group_offloading(net, onload_device=torch.device("npu"), **options)
    return net, Net(count, size, seed).to("npu"), torch.linspace(0, 1, size, device="npu").reshape(1, size)

def check(net, resident, x):
    for _ in range(2):
        assert torch.equal(net(x), resident(x))
    for mine, theirs in zip(net.parameters(), resident.parameters()):
        assert mine.device.type == "cpu" and torch.equal(mine, theirs.cpu())

def descriptors():
    return len(os.listdir("/proc/self/fd"))

if scene == "low":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    before = descriptors()
    sets = [pair(1000, 4)]
    check(*sets[0])
    assert descriptors() < before + 8
    sets += [pair(3, 4, seed) for seed in range(40)]
    for one in sets:
        check(*one)
    assert sum(file.fd is None for file in disk.files()) > 30
    for net in sets[5][:2]:
        net.blocks[1].weight.data.mul_(2)
    check(*sets[5])
    del sets, one, net
    gc.collect()
    assert disk.files() == [] and descriptors() <= before + 2, descriptors()
elif scene == "ends":
    one = pair()
    check(*one)

    def changed():
        # The child of a fork: what it changes is its own.
        for net in one[:2]:
            net.blocks[0].weight.data.add_(1)
        check(*one)

    def raising():
        check(*pair(seed=1))
        raise KeyError("on purpose")

    def terminated():
        check(*pair(seed=1))
        os.kill(os.getpid(), signal.SIGTERM)

    def killed():
        real = os.pwrite
        def pwrite(fd, data, offset):
            if offset:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(fd, data, offset)
        os.pwrite = pwrite
        pair(seed=1)

    for end, status in ((changed, 0), (raising, 1), (terminated, -signal.SIGTERM), (killed, -signal.SIGKILL)):
        child = os.fork()
        if not child:
            end()
            sys.exit(0)
        found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert found == status, (end, found)
        assert os.listdir(folder) == [], end
        check(*one)
elif scene == "two":
    two = [pair(seed=seed + os.getpid()) for seed in range(2)]
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(30):
        for one in two:
            check(*one)
print("done")
"""


def scene(name: str, folder: Path) -> Any:
    return python("-c", SCENES, name, folder)


@pytest.mark.parametrize("name", ["low", "ends"])
def test_a_process_and_what_it_leaves(name: str, tmp_path: Path) -> None:
    """1,000 groups with few descriptors; a fork, an exception, SIGTERM, and SIGKILL in the middle of a write."""
    done = scene(name, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done" in done.stdout and (name == "low" or "on purpose" in done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_in_one_folder(tmp_path: Path) -> None:
    import subprocess

    from fresh import environment

    command = [sys.executable, "-c", SCENES, "two", str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [(process.returncode, output) for process, output in zip(processes, outputs)] == [(0, "done\n")] * 2
    assert list(tmp_path.iterdir()) == []
    assert sim.hazards() == []
