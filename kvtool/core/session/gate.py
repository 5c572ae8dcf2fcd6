"""The gate: a model's first meeting with a store checks that its fused caches are what full recompute gives.

This file keeps its verdicts beside the store, one file a model; `session/laws.py` finds them, and needs torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.errors import GateError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

GATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One law, and how far the model is from it: RMS difference over the reference's standard deviation."""

    law: int
    name: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What the gate found for a model; kept in the store under the model's fingerprint."""

    fingerprint: str
    checks: tuple[GateCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(check) | {"passed": check.passed} for check in self.checks]
        return {"format": GATE_FORMAT, "fingerprint": self.fingerprint, "passed": self.passed, "checks": rows}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> GateVerdict:
        keys = ("law", "name", "difference", "allowed")
        return cls(row["fingerprint"], tuple(GateCheck(**{key: check[key] for key in keys}) for check in row["checks"]))

    def enforce(self) -> None:
        """Refuse fused answers when a check failed."""
        failed = [check for check in self.checks if not check.passed]
        if failed:
            numbers = "; ".join(f"law {c.law} ({c.name}): {c.difference:.3g} > {c.allowed:.3g}" for c in failed)
            raise GateError(
                f"the gate refuses this model: {numbers}",
                "use --fusion full, or --force to answer from caches that are known to be wrong",
            )


def stored_verdict(store: Store, fingerprint: str) -> GateVerdict | None:
    """What the gate found for a model at its first meeting with this store; None before that."""
    try:
        return GateVerdict.from_json(read_side(store, _name(fingerprint), format=GATE_FORMAT))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or unreadable: the gate is run again


def keep_verdict(store: Store, verdict: GateVerdict) -> None:
    """Keep a verdict beside the store; where it cannot be kept, the gate is run again next time."""
    write_side(store, _name(verdict.fingerprint), verdict.to_json())


def _name(fingerprint: str) -> str:
    return f"gate/{fingerprint}.json"
