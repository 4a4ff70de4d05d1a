"""Installing and undoing, on a small target of our own."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diffusers_offload_fix import patcher
from diffusers_offload_fix.patcher import Patch, PatchError, Place

SOURCE = """
class Base:
    def inherited(self): return "inherited"

class Group(Base):
    def __init__(self, size, colour="red"): self.size = size
    def load(self, size): return size
    @staticmethod
    def fixed(size): return size
"""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(patcher, "_records", {})
    module = types.ModuleType("a_target")
    monkeypatch.setitem(sys.modules, "a_target", module)
    exec(compile(SOURCE, "a_target.py", "exec"), vars(module))
    yield module
    patcher.undo()


def double(original: Callable[..., Any]) -> Callable[..., Any]:
    def doubled(*args: Any) -> Any:
        return 2 * original(*args)

    return doubled


def grow(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    instance.size += 1


LOAD = Patch("Group.load", "mover", "replace", double, ("size",))
FIXED = Patch("Group.fixed", "mover", "replace", double, ("size",))
INIT = Patch("Group.__init__", "mover", "wrap", grow, ("size", "colour"))
ADDED = Patch("Group.inherited", "mover", "add", double)
NEW = Patch("Group.brand_new", "other", "add", lambda original: lambda self: original)
ALL = [LOAD, FIXED, INIT, ADDED, NEW]


def test_each_kind_is_installed_and_undone(target: Any) -> None:
    before = dict(vars(target.Group))
    assert {patcher.look(target, patch) for patch in ALL} == {Place.PRISTINE}
    patcher.install(target, ALL)
    group = target.Group(2)
    assert (group.size, group.load(3), target.Group.fixed(4), group.inherited()) == (3, 6, 8, "inheritedinherited")
    assert group.brand_new() is None
    assert {patcher.look(target, patch) for patch in ALL} == {Place.OURS}
    assert patcher.undo() == []
    after = dict(vars(target.Group))
    assert set(after) == set(before)
    assert all(after[name] is before[name] for name in before if name not in ("__dict__", "__weakref__"))


def test_the_original_can_be_reached_from_a_replacement(target: Any) -> None:
    before = {patch.path: vars(target.Group).get(patch.path.split(".")[1]) for patch in ALL}
    patcher.install(target, ALL)
    assert target.Group.load.__wrapped__ is before["Group.load"]
    assert target.Group.fixed.__wrapped__ is before["Group.fixed"].__func__
    assert target.Group.inherited.__wrapped__ is target.Base.inherited
    assert patcher.original(target.Group, "load") is before["Group.load"]
    assert patcher.original(target.Group, "brand_new") is None
    assert patcher.is_ours(vars(target.Group)["load"]) and not patcher.is_ours(before["Group.load"])


def test_installing_is_all_or_nothing(target: Any) -> None:
    before = dict(vars(target.Group))

    def broken(original: Any) -> Any:
        raise KeyError("broken on purpose")

    with pytest.raises(PatchError, match=r"Group\.load: KeyError"):
        patcher.install(target, [FIXED, INIT, Patch("Group.load", "mover", "replace", broken)])
    assert all(vars(target.Group)[name] is before[name] for name in ("load", "fixed", "__init__"))


def test_an_attribute_that_is_gone_has_drifted(target: Any) -> None:
    assert patcher.look(target, Patch("Group.gone", "mover", "replace", double)) is Place.DRIFTED
    assert patcher.look(target, Patch("Nobody.load", "mover", "add", double)) is Place.DRIFTED


def test_a_parameter_that_is_gone_has_drifted(target: Any) -> None:
    assert patcher.look(target, Patch("Group.load", "mover", "replace", double, ("weight",))) is Place.DRIFTED


@pytest.mark.parametrize("is_wrapper", [False, True])
def test_somebody_elses_patch_is_seen(target: Any, is_wrapper: bool) -> None:
    theirs = double(target.Group.load)
    if is_wrapper:
        theirs.__wrapped__ = target.Group.load  # type: ignore[attr-defined]
    target.Group.load = theirs
    assert patcher.look(target, LOAD) is Place.FOREIGN


def test_what_overwrites_ours_is_seen_and_left(target: Any) -> None:
    patcher.install(target, [LOAD])
    target.Group.load = theirs = lambda self, size: 0
    assert patcher.look(target, LOAD) is Place.DISPLACED
    assert patcher.undo() == ["Group.load"]
    assert vars(target.Group)["load"] is theirs


def test_what_wraps_ours_leaves_it_in_force(target: Any) -> None:
    patcher.install(target, [LOAD])
    theirs = double(target.Group.load)
    theirs.__wrapped__ = target.Group.load  # type: ignore[attr-defined]
    target.Group.load = theirs
    assert patcher.look(target, LOAD) is Place.OURS
    assert patcher.undo() == ["Group.load"]


def test_one_cure_can_be_undone_alone(target: Any) -> None:
    patcher.install(target, ALL)
    patcher.undo("other", target, tuple(ALL))
    assert patcher.look(target, NEW) is Place.PRISTINE and patcher.look(target, LOAD) is Place.OURS


def test_a_new_class_of_the_same_name_is_pristine(target: Any) -> None:
    patcher.install(target, [LOAD])
    old = target.Group
    exec(compile(SOURCE, "a_target.py", "exec"), vars(target))
    assert patcher.look(target, LOAD) is Place.PRISTINE
    patcher.install(target, [LOAD])
    patcher.undo()
    assert old(1).load(3) == target.Group(1).load(3) == 3


def test_a_layer_of_torch_is_upstreams_own(target: Any) -> None:
    torch = pytest.importorskip("torch")
    target.Group.load = torch.compiler.disable(target.Group.load)
    assert patcher.look(target, LOAD) is Place.PRISTINE
