"""The mean of several reports of one form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def mean_of(values: Sequence[Any]) -> Any:
    """Average reports number by number, in lists and objects too; what is no number is taken from the first.

    None stands for a number that there is not: the mean is of the others.
    """
    first = next((value for value in values if value is not None), None)
    if isinstance(first, bool) or first is None or isinstance(first, str):
        return first
    if isinstance(first, dict):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean_of(list(items)) for items in zip(*values, strict=True)]
    mean = statistics.fmean(value for value in values if value is not None)
    return int(mean) if all(isinstance(value, int) for value in values) and mean == int(mean) else mean
