"""Estimate of a link's throughput, from the transfers that it has carried."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from kvtool.core.errors import UsageError

_WINDOW = 5  # transfers that the harmonic mean is taken over, as players of streamed video take it
_NEWEST = 0.5  # weight of the newest transfer in the moving average


class Estimator(Protocol):
    """Bandwidth of a link. One that has seen nothing expects nothing."""

    def observe(self, size: float, seconds: float) -> None:
        """A transfer of `size` bytes, waiting for its first byte included."""

    @property
    def bytes_per_second(self) -> float | None:
        """Return the expected throughput of the next transfer; None before the first."""


class Last:
    """The last transfer's (CacheGen, arXiv 2310.07240, section 5.3)."""

    def __init__(self) -> None:
        self._rate: float | None = None

    def observe(self, size: float, seconds: float) -> None:
        if size and seconds > 0:
            self._rate = size / seconds

    @property
    def bytes_per_second(self) -> float | None:
        return self._rate


class Ewma:
    """Exponentially weighted moving average: forgets a single odd transfer, follows a change with a delay."""

    def __init__(self, newest: float = _NEWEST) -> None:
        self._newest = newest
        self._rate: float | None = None

    def observe(self, size: float, seconds: float) -> None:
        if size and seconds > 0:
            rate = size / seconds
            self._rate = rate if self._rate is None else self._newest * rate + (1 - self._newest) * self._rate

    @property
    def bytes_per_second(self) -> float | None:
        return self._rate


class Harmonic:
    """Harmonic mean of the last few transfers' rates: a slow one weighs most, so that it errs on the safe side."""

    def __init__(self, window: int = _WINDOW) -> None:
        self._rates: deque[float] = deque(maxlen=window)

    def observe(self, size: float, seconds: float) -> None:
        if size and seconds > 0:
            self._rates.append(size / seconds)

    @property
    def bytes_per_second(self) -> float | None:
        return len(self._rates) / sum(1 / rate for rate in self._rates) if self._rates else None


PREDICTORS: dict[str, type[Last] | type[Ewma] | type[Harmonic]] = {"last": Last, "ewma": Ewma, "harmonic": Harmonic}
DEFAULT_PREDICTOR = "harmonic"
DEFAULT_MARGIN = 0.1  # of the estimate that is not counted on


def make_estimator(name: str) -> Estimator:
    """A fresh estimator.

    Raises
    ------
    UsageError : there is none of that name.
    """
    if name not in PREDICTORS:
        raise UsageError(f"there is no predictor {name!r}", f"known: {', '.join(PREDICTORS)}")
    return PREDICTORS[name]()
