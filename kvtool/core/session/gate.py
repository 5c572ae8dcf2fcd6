"""The gate: a model's first meeting with a store checks that its fused caches are what full recompute gives.

This file keeps its verdicts beside the store, one file a model; `session/laws.py` finds them, and needs torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.common.arithmetic import DEVICE_KINDS, NUMBER_FORMATS, Arithmetic
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
    arithmetic: str = ""  # what computed it, such as "bfloat16 on cpu"; "": an earlier kvtool did not say

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What the gate found for a model; kept in the store under the model's fingerprint and what it computes in.

    Attributes
    ----------
    of_others : what is lost, in nats a token, by records that another arithmetic has made ("float32 on cpu") in place
        of one's own.
    """

    fingerprint: str
    checks: tuple[GateCheck, ...]
    of_others: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def compared(self) -> set[Arithmetic]:
        """Whose records were held against one's own."""
        known = (Arithmetic(*names) for names in product(NUMBER_FORMATS, DEVICE_KINDS))
        return {one for one in known if str(one) in self.of_others}

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(check) | {"passed": check.passed} for check in self.checks]
        verdict: dict[str, Any] = {
            "format": GATE_FORMAT,
            "fingerprint": self.fingerprint,
            "passed": self.passed,
            "checks": rows,
        }
        if self.of_others:
            verdict["loss_by_arithmetic"] = self.of_others
        return verdict

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> GateVerdict:
        keys = ("law", "name", "difference", "allowed")
        checks = tuple(
            GateCheck(**{key: check[key] for key in keys}, arithmetic=str(check.get("arithmetic", "")))
            for check in row["checks"]
        )
        of_others = {str(name): float(loss) for name, loss in row.get("loss_by_arithmetic", {}).items()}
        return cls(row["fingerprint"], checks, of_others)

    def enforce(self) -> None:
        """Refuse fused answers when a check failed."""
        failed = [check for check in self.checks if not check.passed]
        if failed:
            numbers = "; ".join(f"law {c.law} ({c.name}): {c.difference:.3g} > {c.allowed:.3g}" for c in failed)
            raise GateError(
                f"the gate refuses this model: {numbers}",
                "use --fusion full, or --force to answer from caches that are known to be wrong",
            )


def stored_verdict(store: Store, model: str, arithmetic: Arithmetic) -> GateVerdict | None:
    """What the gate found for a model that computes in this at its first meeting with this store; None before that."""
    try:
        return GateVerdict.from_json(read_side(store, _file(model, arithmetic), format=GATE_FORMAT))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or unreadable: the gate is run again


def known_verdict(store: Store, model: str) -> GateVerdict | None:
    """What the gate found for a model in every arithmetic that has met the store, as one; None before the first."""
    found = [
        verdict
        for names in product(NUMBER_FORMATS, DEVICE_KINDS)
        if (verdict := stored_verdict(store, model, Arithmetic(*names))) is not None
    ]
    if not found:
        return None
    losses = [one.of_others for one in found]
    worst = {made: max(row.get(made, 0.0) for row in losses) for made in sorted({*chain.from_iterable(losses)})}
    return GateVerdict(model, tuple(check for one in found for check in one.checks), worst)


def keep_verdict(store: Store, verdict: GateVerdict, arithmetic: Arithmetic) -> None:
    """Keep a verdict beside the store; where it cannot be kept, the gate is run again next time."""
    write_side(store, _file(verdict.fingerprint, arithmetic), verdict.to_json())


def _file(model: str, arithmetic: Arithmetic) -> str:
    return f"gate/{model}-in-{arithmetic.dtype}-on-{arithmetic.device}.json"
