"""What the plugin did, in data and in words."""

from __future__ import annotations

import os
import platform
import sys

from diffusers_offload_fix import switches, versions
from diffusers_offload_fix.fixes import all_fixes
from diffusers_offload_fix.status import State, Status, failures, statuses, target

DISTRIBUTIONS = (
    "diffusers-offload-fix",
    "torch",
    "diffusers",
    "torchao",
    "optimum-quanto",
    "bitsandbytes",
    "gguf",
    "accelerate",
    "transformers",
    "peft",
    "wrapt",
)


def report() -> tuple[Status, ...]:
    """The status of every upstream bug that the plugin knows, asked from the live classes at this moment.

    Imports nothing of diffusers: before it is imported the state is "waiting".
    """
    module = target()
    if module is None:
        return statuses(None, (), all_fixes())
    fixes = all_fixes()
    try:
        from diffusers_offload_fix.activation import patches

        return statuses(module, patches(), fixes)
    except ImportError as error:
        failures.update({fix.cure: f"the plugin cannot be loaded: {error}" for fix in fixes})
        return statuses(module, (), fixes)


def environment() -> dict[str, object]:
    """Versions, device and switches: what a bug report needs."""
    found: dict[str, object] = {"python": platform.python_version(), "platform": platform.platform()}
    found.update({name: versions.installed(name) for name in DISTRIBUTIONS})
    found["device"] = device()
    found["switches"] = {name: os.environ.get(name) for name in (switches.MODE, switches.SKIP)}
    return found


def device() -> str | None:
    """The accelerator that torch sees, in words; None without one, or before torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "accelerator") or not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator)
    name = module.get_device_name() if hasattr(module, "get_device_name") else accelerator.type
    return f"{accelerator.type}: {name} x {torch.accelerator.device_count()}"


def as_dict() -> dict[str, object]:
    """The whole account, of plain types only."""
    rows = [
        {
            "id": row.id,
            "name": row.name,
            "state": row.state.value,
            "detail": row.detail,
            "cure": row.cure,
            "summary": row.summary,
            "issues": list(row.issues),
            "versions": row.versions,
        }
        for row in report()
    ]
    return {"environment": environment(), "fixes": rows}


def as_text() -> str:
    """The whole account for a terminal: versions first, then one line a bug."""
    lines = [f"{name:22}{_words(value)}" for name, value in environment().items()]
    rows = report()
    width = max((len(row.name) for row in rows), default=0)
    lines.append("")
    for row in rows:
        issues = ", ".join(issue.removeprefix("huggingface/") for issue in row.issues) or "no report"
        lines.append(f"{row.state.value:15}{row.id:6}{row.name:{width + 2}}{row.summary} ({issues})")
        if row.detail and row.state not in (State.APPLIED,):
            lines.append(f"{'':15}{'':6}{row.detail}")
    bad = sum(not row.is_good for row in rows)
    lines.append("")
    lines.append(f"{len(rows) - bad} of {len(rows)} bugs are cured or absent" + (f", {bad} are not" if bad else ""))
    return "\n".join(lines)


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={'unset' if setting is None else setting}" for name, setting in value.items())
    return "none" if value is None else str(value)
