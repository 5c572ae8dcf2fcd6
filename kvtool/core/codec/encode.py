"""One layer at several levels at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Payload
from kvtool.core.codec.cachegen import encode_nested
from kvtool.core.codec.levels import nested
from kvtool.core.codec.profile import Profile

_NO_BASES: Mapping[str, Payload] = MappingProxyType({})


def encode_levels(
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    levels: Sequence[str],
    profile: Profile | None = None,
    *,
    bases: Mapping[str, Payload] = _NO_BASES,
    predictor: str = "auto",
    layers: int,
) -> dict[str, Sequence[Payload]]:
    """Encode one layer at several levels: nested ones together (see `encode_nested`), others one by one.

    Returns
    -------
    The parts of a record for each level.
    """
    together = nested(levels)
    made: dict[str, Sequence[Payload]] = {}
    if together:
        made |= encode_nested(keys, values, layer, together, profile, bases=bases, predictor=predictor, layers=layers)
    alone = {level: CODECS[level].encode(keys, values, layer, profile) for level in levels if level not in made}
    return made | alone
