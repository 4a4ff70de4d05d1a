"""Run-time patch that makes diffusers' group offloading correct for every kind of tensor.

Importing the package activates it, before or after diffusers. Nothing heavy is imported until diffusers' group
offloading module is loaded, so that the import is cheap enough for a `sitecustomize`.
"""

from diffusers_offload_fix import _startup

__version__ = "0.1.0"
__all__ = ["Status", "__version__", "activate", "deactivate", "disable_group_offload", "report"]

_HOMES = {
    "activate": "activation",
    "deactivate": "activation",
    "disable_group_offload": "removal",
    "report": "account",
    "Status": "status",
}


def __getattr__(name: str) -> object:
    """Fetch a public name from its module on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = __import__(f"{__name__}.{home}", fromlist=[name])
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_startup.begin()
