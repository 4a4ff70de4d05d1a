"""Every kind of tensor that group offloading meets, each inside a small model built as a user would build it."""

from .catalogue import KINDS, Kind, available

__all__ = ["KINDS", "Kind", "available"]
