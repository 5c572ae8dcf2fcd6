"""Layers of a chunk at several levels at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import LayerKV, Payload
from kvtool.core.codec.cachegen import encode_layers
from kvtool.core.codec.levels import nested
from kvtool.core.codec.profile import Profile

_NO_BASES: Mapping[str, Sequence[Payload]] = MappingProxyType({})


def encode_levels(
    numbers: Sequence[int],
    kvs: Sequence[LayerKV],
    levels: Sequence[str],
    profile: Profile | None = None,
    *,
    bases: Mapping[str, Sequence[Payload]] = _NO_BASES,
    predictor: str = "auto",
    layers: int,
) -> dict[str, list[Sequence[Payload]]]:
    """Encode layers of one chunk at several levels: nested ones together (see `encode_layers`), others one by one.

    Returns
    -------
    For each level the parts of each layer's record.
    """
    together = nested(levels)
    made: dict[str, list[Sequence[Payload]]] = {}
    if together:
        some = encode_layers(numbers, kvs, together, profile, bases=bases, predictor=predictor, layers=layers)
        made.update({level: [*records] for level, records in some.items()})
    for level in (level for level in levels if level not in made):
        made[level] = [CODECS[level].encode(*kv, layer, profile) for layer, kv in zip(numbers, kvs, strict=True)]
    return made
