"""What came of a fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class FitReport:
    """Tells the result of `fit lead-in`.

    Attributes
    ----------
    warm, learned : squared error of keys and values against a real prompt's, in variances of their layer, mean over
        the tokens of held-out chunks; `chunks` of them.
    resumed : rounds that an earlier run had done.
    """

    digest: str = ""
    tokens: int = 0
    bytes: int = 0
    rounds: int = 0
    resumed: int = 0
    seconds: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Make the JSON object of `fit lead-in --json`."""
        return asdict(self)
