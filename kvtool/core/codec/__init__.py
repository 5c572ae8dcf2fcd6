"""Codecs: keys and values ⇄ bytes, by level (`levels` lists these)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import LEVELS

if TYPE_CHECKING:
    from kvtool.core.codec.base import Codec

CODECS: dict[str, Codec]  # by level

__all__ = ["CODECS"]


def __getattr__(name: str) -> Any:
    """Import the codecs, and torch with them, only when they are used: `levels` is imported without torch."""
    if name != "CODECS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    codecs = {}
    for level in LEVELS.values():
        module, _, kind = level.codec.partition(":")
        codecs[level.name] = getattr(import_module(module, __name__), kind)(level.name)
    globals()["CODECS"] = codecs
    return codecs
