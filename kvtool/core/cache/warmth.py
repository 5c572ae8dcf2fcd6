"""LRFU score of a chunk: how recently and how often it was used, as one number.

Every use counts for half as much after `HALF_LIFE` (LRFU: Lee et al., IEEE Transactions on Computers 50(12), 2001,
section 3). The stored score is the time at which a single use would count for as much as all uses together. It does
not change as time passes, so scores of any age are compared without a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

HALF_LIFE = (
    3 * 86_400.0
)  # seconds; as many as 30 to 3,000 questions fetch less than by recency alone (samples/results/front.md)


def joined(one: float, other: float, half_life: float = HALF_LIFE) -> float:
    """The warmth of what was used as both say.

    Parameters
    ----------
    one, other : seconds since 1970, each of a use or the warmth of many; 0: never.
    """
    low, high = sorted((one, other))
    return high + half_life * math.log2(1 + 2 ** ((low - high) / half_life)) if low > 0 else high


def warmths(uses: Iterable[tuple[bytes, float]]) -> dict[bytes, float]:
    """Chunk id → warmth, of uses: chunk id and seconds since 1970, in any order."""
    warm: dict[bytes, float] = {}
    for chunk_id, when in uses:
        warm[chunk_id] = joined(warm.get(chunk_id, 0.0), when)
    return warm
