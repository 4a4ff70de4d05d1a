"""What `check` runs: kinds of weights, and memory modes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Kinds of weights, and the module that each needs besides diffusers.
WEIGHTS: dict[str, str | None] = {"plain": None, "torchao-int8": "torchao", "quanto-qint8": "optimum.quanto"}


#: The end of the name of a mode whose weights are in files; the folder is added when a case runs.
DISK = "+disk"


def _modes() -> dict[str, dict[str, Any]]:
    ways: dict[str, dict[str, Any]] = {
        "": {},
        "+stream": {"use_stream": True},
        "+stream+record": {"use_stream": True, "record_stream": True},
        "+stream+low": {"use_stream": True, "low_cpu_mem_usage": True},
    }
    kinds: dict[str, dict[str, Any]] = {
        "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
        "leaf": {"offload_type": "leaf_level"},
    }
    found = {kind + way: {**base, **extra} for kind, base in kinds.items() for way, extra in ways.items()}
    return {**found, **{name + DISK: found[name] for name in ("block", "block+stream", "leaf+stream")}}


#: Arguments of `enable_group_offload`, by name.
MODES: dict[str, dict[str, Any]] = _modes()


def streamed(mode: str) -> bool:
    """True for a mode that needs an accelerator with streams."""
    return bool(MODES[mode].get("use_stream"))


def on_disk(mode: str) -> bool:
    """True for a mode that needs a folder."""
    return mode.endswith(DISK)


@dataclass(frozen=True)
class Case:
    """One kind of weights in one mode."""

    weights: str
    mode: str


def grid(weights: list[str], modes: list[str]) -> list[Case]:
    """All of them, one kind of weights after another."""
    return [Case(kind, mode) for kind in weights for mode in modes]


def chosen(text: str, known: dict[str, Any]) -> list[str]:
    """The names in a comma-separated list.

    Raises:
        ValueError: a name is not known; the message lists those that are.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    strange = [name for name in names if name not in known]
    if strange or not names:
        what = ", ".join(map(repr, strange)) or "an empty list"
        raise ValueError(f"{what}: choose from {', '.join(known)}")
    return list(dict.fromkeys(names))
