"""How long computing and loading take on one machine: the controller's two measured quantities, and how they overlap.

Decisions use these; core/session/speeds.py measures them and keeps them beside the store. Nothing here needs torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MEMORY = "memory"  # among the levels: KV that is held decoded, which is only put into its place and rotated


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """Seconds of one pass: `fixed` (weights read, calls made) + `row` a row + `key` a key that a row sees."""

    fixed: float
    row: float
    key: float

    def seconds(self, rows: float, keys: float) -> float:
        """The time of a pass over so many rows, which see so many keys in all."""
        return self.fixed + self.row * rows + self.key * keys


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """Seconds of reading, decoding, uploading and rotating all layers: `fixed` + `token` a token.

    Attributes
    ----------
    busy : cores that are kept busy meanwhile.
    bytes_per_second : raw-equivalent KV bytes a second; what is shown, not what is computed with.
    """

    fixed: float
    token: float
    busy: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Load:
    """What loading takes: seconds alone on the machine, and core-seconds."""

    seconds: float
    core_seconds: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one machine, device, model and dtype.

    Attributes
    ----------
    loads : speeds of loading, by codec level and `MEMORY`.
    cores : how many this process may use. `threads` : how many of these a pass uses.
    own_memory : the device computes by itself (a GPU), so that loading takes no core from it.
    """

    passes: PassSpeed
    loads: Mapping[str, LoadSpeed]
    layers: int
    cores: int = 1
    threads: int = 1
    own_memory: bool = False

    def load(self, tokens: Mapping[str, float]) -> Load:
        """What loading so many tokens of each level takes; every level must have been measured."""
        seconds = {level: self.loads[level].fixed + self.loads[level].token * n for level, n in tokens.items() if n}
        busy = sum(self.loads[level].busy * took for level, took in seconds.items())
        return Load(sum(seconds.values()), busy)

    def beside(self, load: Load, compute: float) -> float:
        """Seconds of a pass whose layers are loaded while the ones before compute (CacheBlend, section 5).

        Neither can be faster than alone: the last layer computes after it is loaded, the first loads before it
        computes. On the CPU both also want the same cores: the core-seconds of both over the cores there are.
        """
        alone = max(load.seconds + compute / self.layers, load.seconds / self.layers + compute)
        if self.own_memory:
            return alone
        return max(alone, (load.core_seconds + compute * self.threads) / max(self.cores, self.threads))

    def to_json(self) -> dict[str, Any]:
        """What was measured."""
        return {"pass": asdict(self.passes), "loads": {level: asdict(one) for level, one in self.loads.items()}}


def read_numbers(kind: type[PassSpeed] | type[LoadSpeed], row: Any) -> Any:
    """A speed from its JSON.

    Raises
    ------
    ValueError, TypeError, KeyError : it is not one.
    """
    values = {name: float(row[name]) for name in kind.__slots__}
    if not all(math.isfinite(value) and value >= 0 for value in values.values()):
        raise ValueError("a speed is a finite number")
    return kind(**values)


def fit_pass(samples: Sequence[tuple[float, float, float]]) -> PassSpeed:
    """Speed from samples of (rows, keys, seconds)."""
    coefficients = fit([(1.0, rows, keys) for rows, keys, _ in samples], [seconds for *_, seconds in samples])
    return PassSpeed(*coefficients)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares of the relative error: coefficients by column.

    With three columns the best set of those that are not zero is found by trying all.
    """
    target = np.asarray(seconds, dtype=float)
    matrix = np.asarray(rows, dtype=float) / target[:, None]
    count = matrix.shape[1]
    best, error = [0.0] * count, math.inf
    for size in range(1, count + 1):
        for used in itertools.combinations(range(count), size):
            part = matrix[:, used]
            scale = np.abs(part).max(0)
            solution = np.linalg.lstsq(part / scale, np.ones(len(target)), rcond=None)[0] / scale
            residual = float(np.square(part @ solution - 1).sum())
            if (solution >= 0).all() and residual < error - 1e-9:
                best = [0.0] * count
                for column, value in zip(used, solution.tolist(), strict=True):
                    best[column] = value
                error = residual
    return best
