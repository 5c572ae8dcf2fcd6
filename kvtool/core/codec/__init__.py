"""KV tensor ⇄ bytes. The registry: a new codec is a file here and a line below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.core.codec.base import Codec

CODECS: dict[str, Codec]  # by level

__all__ = ["CODECS"]


def __getattr__(name: str) -> Any:
    """Import the codecs, and torch with them, only when they are asked for: `levels` is for everybody."""
    if name != "CODECS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtool.core.codec.cachegen import CacheGen
    from kvtool.core.codec.levels import LOSSY
    from kvtool.core.codec.lossless import Lossless
    from kvtool.core.codec.raw import Raw

    codecs: tuple[Codec, ...] = (Raw(), Lossless(), *map(CacheGen, LOSSY))
    made = globals()["CODECS"] = {codec.level: codec for codec in codecs}
    return made
