"""Trial of a fast path: how far its numbers may be from those of the model's own forward."""

from __future__ import annotations

import math

import torch

# The largest relative error of a fast path behind one layer; behind n layers √n times as much, as rounding adds up.
# Measured over all families of the tests, behind four layers: 5e-6 in float32 and .08 in bfloat16; SmolLM2, behind
# thirty: .08. Where something is computed otherwise it is 1 and more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}


class UnsupportedArchitecture(Exception):
    """Raised where a fast path does not compute what a model computes; the text says what, and is shown."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square difference, by the spread of what is expected."""
    found, expected = found.float(), expected.float()
    spread = (expected - expected.mean()).square().mean().sqrt()
    return float((found - expected).square().mean().sqrt() / spread.clamp_min(1e-12))


def check_trial(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, layers: int) -> None:
    """Compare what a fast path gives behind so many layers with what the model's own forward gives.

    Parameters
    ----------
    dtype : what the model computes in.

    Raises
    ------
    UnsupportedArchitecture : it gives something else than rounding explains, or no numbers.
    """
    error = relative_error(found, expected)
    if not error <= TOLERANCE[dtype] * math.sqrt(layers):
        raise UnsupportedArchitecture(f"the model's own forward gives something else: {error:.2g} of its spread apart")
