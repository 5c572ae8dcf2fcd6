"""Encode the layers of a chunk at several levels at once, or some of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from kvtool.core.codec import CODECS, analysis
from kvtool.core.codec.base import LayerKV, Payload
from kvtool.core.codec.levels import level_of, nested
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.row_subset import tail_of
from kvtool.core.common.types import Ids

_NO_BASES: Mapping[str, Sequence[Payload]] = MappingProxyType({})


def encode_levels(
    kvs: Sequence[LayerKV],
    levels: Sequence[str],
    profile: Profile | None = None,
    bases: Mapping[str, Sequence[Payload]] = _NO_BASES,
) -> dict[str, list[Sequence[Payload]]]:
    """Encode all layers of one chunk at several levels.

    A nested level refines the next coarser one where that is among `levels` or `bases`, so that both together take
    hardly more than the finer alone.

    Parameters
    ----------
    kvs : keys and values of each layer, `[kv_heads, tokens, head_dim]`.
    bases : records at coarser levels that are stored already, made with this profile, one a layer.

    Returns
    -------
    For each level the parts of each layer's record.

    Raises
    ------
    KvtoolError : a level needs a profile, and there is none; numbers that are not finite.
    """
    made: dict[str, list[Sequence[Payload]]] = {}
    if together := nested(levels):
        below = {level: [[record] for record in records] for level, records in bases.items()}
        some = analysis.encode(profile, range(len(kvs)), kvs, together, below)
        made |= {level: [*records] for level, records in some.items()}
    return made | {level: [*CODECS[level].encode_layers(kvs, profile)] for level in levels if level not in made}


def encode_rows(
    kvs: Sequence[LayerKV], rows: Ids, level: str, profile: Profile | None = None
) -> list[Sequence[Payload]]:
    """Encode some rows of a chunk's layers at a level that leaves the others out; each record stands alone.

    Parameters
    ----------
    kvs : of all rows, `[kv_heads, tokens, head_dim]` each.
    rows : those that stay, ascending.
    """
    inner, tokens = level_of(level).inner, kvs[0][0].shape[1]
    made = encode_levels(some_rows(kvs, rows), [inner], profile)[inner]
    return [[*parts, tail_of(rows, tokens)] for parts in made]


def some_rows(kvs: Sequence[LayerKV], rows: Ids) -> list[LayerKV]:
    """These rows of every layer's keys and values."""
    at = torch.tensor(rows, dtype=torch.int64)
    return [(keys.index_select(1, at), values.index_select(1, at)) for keys, values in kvs]
