"""What can be set of the learning of a lead-in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtool.core.cache.options import LockOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import option

LEARNING = "Learning"  # the heading in the command's help


@dataclass(frozen=True, kw_only=True)
class FitOptions(ModelOptions, LockOptions, settings=False, group=LEARNING):
    """What is learned from, or taken over.

    Attributes
    ----------
    rounds : two steps each. Measured with smollm2 on 2 cores: held-out loss falls to half in the first third of the
        default, and little at its end.
    """

    rounds: int = option(150, "How many prompts it learns from.", lowest=1)
    rate: float = option(0.004, "Step size of the learning.", flag=None, lowest=0)
    source: Path | None = option(
        None, "Take what this other store of the same model has learned.", flag="--from", metavar="STORE", unit="path"
    )
