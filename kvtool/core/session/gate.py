"""The gate: a model's first meeting with a store checks that its fused caches are what full recompute gives.

This file keeps its verdicts beside the store, one file a model; `session/laws.py` finds them, and needs torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.errors import GateError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.identity import StoreIdentity

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
    """What the gate found for a model; kept in the store under the model's fingerprint.

    Attributes
    ----------
    losses : of a model that keeps states, whose chunks were computed apart: what a mode loses, in nats a token.
    """

    fingerprint: str
    checks: tuple[GateCheck, ...]
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(check) | {"passed": check.passed} for check in self.checks]
        verdict = {"format": GATE_FORMAT, "fingerprint": self.fingerprint, "passed": self.passed, "checks": rows}
        return verdict | ({"loss_by_mode": self.losses} if self.losses else {})

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> GateVerdict:
        keys = ("law", "name", "difference", "allowed")
        checks = tuple(GateCheck(**{key: check[key] for key in keys}) for check in row["checks"])
        return cls(
            row["fingerprint"], checks, {mode: float(loss) for mode, loss in row.get("loss_by_mode", {}).items()}
        )

    def enforce(self) -> None:
        """Refuse fused answers when a check failed."""
        failed = [check for check in self.checks if not check.passed]
        if failed:
            numbers = "; ".join(f"law {c.law} ({c.name}): {c.difference:.3g} > {c.allowed:.3g}" for c in failed)
            raise GateError(
                f"the gate refuses this model: {numbers}",
                "use --fusion full, or --force to answer from caches that are known to be wrong",
            )

    def enforce_loss(self, mode: str, most: float) -> None:
        """Refuse a mode that loses more than so many nats a token."""
        loss = self.losses.get(mode, 0.0)
        if not loss <= most:
            raise GateError(
                f"{mode} loses {loss:.3g} nats a token of this model, which keeps states: more than {most:g}",
                f"use --fusion prefix, or --max-state-loss {math.ceil(loss * 100) / 100 if math.isfinite(loss) else 1}",
            )


def apart_name(identity: StoreIdentity) -> str:
    """Under which name the verdict on chunks computed apart is kept: of the model, and of what they stand behind."""
    return f"{identity.fingerprint}-behind-{identity.lead_in.digest().hex()}"


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
