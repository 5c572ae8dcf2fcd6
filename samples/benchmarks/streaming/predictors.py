"""Predictors of a link's bandwidth to compare with."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.core.streaming import Harmonic

_NEWEST = 0.5  # weight of the newest transfer in the moving average


class Ewma(Harmonic):
    """Moving average; with weight 1 only the newest transfer counts (CacheGen, arXiv 2310.07240, section 5.3)."""

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


PREDICTORS: dict[str, Callable[[], Harmonic]] = {"last": lambda: Ewma(1.0), "ewma": Ewma, "harmonic": Harmonic}
DEFAULT_PREDICTOR = "harmonic"
