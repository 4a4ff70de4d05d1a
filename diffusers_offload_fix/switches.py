"""The two environment variables that steer the plugin. Read on every question, so a change takes effect at once."""

import os

MODE = "DIFFUSERS_OFFLOAD_FIX"
SKIP = "DIFFUSERS_OFFLOAD_FIX_SKIP"
MODES = ("0", "1", "strict")


class SwitchError(ValueError):
    """An environment variable has a value that the plugin does not know."""


def mode() -> str:
    """The value of DIFFUSERS_OFFLOAD_FIX: "0", "1" (also when unset or empty) or "strict".

    Raises SwitchError, naming the valid values, for any other.
    """
    value = os.environ.get(MODE, "").strip() or "1"
    if value not in MODES:
        raise SwitchError(f"{MODE}={value!r} is not valid: use one of {', '.join(MODES)}")
    return value


def is_off() -> bool:
    return os.environ.get(MODE, "").strip() == "0"


def is_strict() -> bool:
    return os.environ.get(MODE, "").strip() == "strict"


def skipped() -> frozenset[str]:
    """The names in DIFFUSERS_OFFLOAD_FIX_SKIP, valid or not."""
    names = (name.strip() for name in os.environ.get(SKIP, "").split(","))
    return frozenset(name for name in names if name)


def check_skipped(valid: frozenset[str]) -> None:
    """Raise SwitchError, naming the valid names, when DIFFUSERS_OFFLOAD_FIX_SKIP holds one that is not in `valid`."""
    unknown = sorted(skipped() - valid)
    if unknown:
        raise SwitchError(f"{SKIP} names {', '.join(unknown)}; the valid names are: {', '.join(sorted(valid))}")
