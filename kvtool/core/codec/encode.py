"""Layers of a chunk at several levels at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import LayerKV, Payload
from kvtool.core.codec.cachegen import encode_layers
from kvtool.core.codec.kept import tail_of
from kvtool.core.codec.levels import level_of, nested
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Ids

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


def encode_rows(
    numbers: Sequence[int],
    kvs: Sequence[LayerKV],
    rows: Ids,
    level: str,
    profile: Profile | None = None,
    *,
    predictor: str = "auto",
    layers: int,
) -> list[Sequence[Payload]]:
    """Encode some rows of a chunk's layers at a level that leaves the others out; each record stands alone.

    Parameters
    ----------
    kvs : of all rows, `[kv_heads, tokens, head_dim]` each.
    rows : those that stay, ascending.
    """
    inner, tokens = level_of(level).inner, kvs[0][0].shape[1]
    made = encode_levels(numbers, some_rows(kvs, rows), [inner], profile, predictor=predictor, layers=layers)[inner]
    return [[*parts, tail_of(rows, tokens)] for parts in made]


def some_rows(kvs: Sequence[LayerKV], rows: Ids) -> list[LayerKV]:
    """These rows of every layer's keys and values."""
    at = torch.tensor(rows, dtype=torch.int64)
    return [(keys.index_select(1, at), values.index_select(1, at)) for keys, values in kvs]
