"""KV tensor ⇄ bytes. The registry: a new codec is a file here and a line below."""

from __future__ import annotations

from kvtool.core.codec.base import Codec
from kvtool.core.codec.raw import Raw

CODECS: dict[str, Codec] = {codec.level: codec for codec in (Raw(),)}

__all__ = ["CODECS", "Codec"]
