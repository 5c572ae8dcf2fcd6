"""Frequency tables of a bell, of which those that come with kvtool are (cachegen.py)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy.tables import ALPHABET, ESCAPE, ZERO, quantised

_LEAST_PROBABILITY = 1 / 8192  # of a symbol that gets a slot of its own; others are escapes
_ESCAPES = 1 / 4096


def frequencies(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """A table from probabilities `[256]`: rare symbols lose their slots, and the escape always has one."""
    kept = np.where(probabilities >= _LEAST_PROBABILITY * probabilities.sum(), probabilities, 0.0)
    used = np.flatnonzero(kept[:ESCAPE])
    first, last = (used[0], used[-1]) if len(used) else (ZERO, ZERO)
    kept[first : last + 1] = np.maximum(kept[first : last + 1], probabilities.sum() * _LEAST_PROBABILITY)
    kept[ESCAPE] = probabilities.sum() - kept[:ESCAPE].sum()
    kept[ESCAPE] = max(kept[ESCAPE], probabilities.sum() * _ESCAPES)
    return quantised(kept)


def bell(spread: float) -> npt.NDArray[np.float64]:
    """Probabilities `[256]` of rounded numbers around 0, half Laplace and half Gauss of this standard deviation."""
    from math import erf

    edges = np.arange(-ZERO, ALPHABET - ZERO) - 0.5
    edges = np.append(edges, edges[-1] + 1)
    scale = spread / np.sqrt(2)
    tail = 0.5 * np.exp(-np.abs(edges) / scale)
    laplace = np.where(edges < 0, tail, 1 - tail)
    gauss = np.array([0.5 * (1 + erf(edge / spread / np.sqrt(2))) for edge in edges])
    inside = np.diff(0.5 * laplace + 0.5 * gauss)
    inside[ESCAPE] = 0.0
    return np.asarray(inside, np.float64)


def made() -> npt.NDArray[np.uint16]:
    """What the file holds, uint16 `[49, 256]`: spreads from 0.12 to 42 steps. For a test, and for the next version."""
    zeros = np.zeros(ALPHABET)
    zeros[ZERO] = 1.0
    spreads = np.geomspace(0.12, 42, 48)
    return np.stack([frequencies(probabilities) for probabilities in (zeros, *map(bell, spreads))])
