"""Conformance results of a model, stored next to the store: one file for each model and arithmetic.

The gate lets a model answer from fused caches only if these agree with full recompute. `session/gate_checks.py`
measures that when a model first uses a store, and needs torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from kvtool.core.common.arithmetic import DEVICE_KINDS, NUMBER_FORMATS, Arithmetic
from kvtool.core.errors import GateError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

GATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """A law of kvtool/docs/design.md and a model's error: RMS difference over the reference's standard deviation."""

    law: int
    name: str
    difference: float
    allowed: float
    arithmetic: str = ""  # such as "bfloat16 on cpu"; "" of an earlier kvtool

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True, slots=True)
class ConformanceResult:
    """The checks of a model, stored by its fingerprint and its arithmetic.

    Attributes
    ----------
    cross_dtype_loss : nats a token that records of another arithmetic ("float32 on cpu") lose against this one's own.
    """

    fingerprint: str
    checks: tuple[ConformanceCheck, ...]
    cross_dtype_loss: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def compared(self) -> set[Arithmetic]:
        """Return the arithmetics whose records were compared with this one's own."""
        known = (Arithmetic(*names) for names in product(NUMBER_FORMATS, DEVICE_KINDS))
        return {one for one in known if str(one) in self.cross_dtype_loss}

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(check) | {"passed": check.passed} for check in self.checks]
        row: dict[str, Any] = {
            "format": GATE_FORMAT,
            "fingerprint": self.fingerprint,
            "passed": self.passed,
            "checks": rows,
        }
        if self.cross_dtype_loss:
            row["loss_by_arithmetic"] = self.cross_dtype_loss
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> ConformanceResult:
        keys = ("law", "name", "difference", "allowed")
        checks = tuple(
            ConformanceCheck(**{key: check[key] for key in keys}, arithmetic=str(check.get("arithmetic", "")))
            for check in row["checks"]
        )
        cross_dtype_loss = {str(name): float(loss) for name, loss in row.get("loss_by_arithmetic", {}).items()}
        return cls(row["fingerprint"], checks, cross_dtype_loss)

    def enforce(self) -> None:
        """Refuse fused answers when a check failed."""
        failed = [check for check in self.checks if not check.passed]
        if failed:
            numbers = "; ".join(f"law {c.law} ({c.name}): {c.difference:.3g} > {c.allowed:.3g}" for c in failed)
            raise GateError(
                f"the gate refuses this model: {numbers}",
                "use --fusion full, or --force to answer from caches that are known to be wrong",
            )


def stored_result(store: Store, model: str, arithmetic: Arithmetic) -> ConformanceResult | None:
    """Return the stored result of a model that computes in `arithmetic`; None before its first use of the store."""
    try:
        return ConformanceResult.from_json(store.read_side(_file(model, arithmetic), format=GATE_FORMAT))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or unreadable: the checks are run again


def known_result(store: Store, model: str) -> ConformanceResult | None:
    """Merge the stored results of a model in all arithmetics; None before the first."""
    found = [
        result
        for names in product(NUMBER_FORMATS, DEVICE_KINDS)
        if (result := stored_result(store, model, Arithmetic(*names))) is not None
    ]
    if not found:
        return None
    losses = [one.cross_dtype_loss for one in found]
    worst = {made: max(row.get(made, 0.0) for row in losses) for made in sorted({*chain.from_iterable(losses)})}
    return ConformanceResult(model, tuple(check for one in found for check in one.checks), worst)


def keep_result(store: Store, result: ConformanceResult, arithmetic: Arithmetic) -> None:
    """Store a result next to the store; if that fails, the checks are run again next time."""
    store.write_side(_file(result.fingerprint, arithmetic), result.to_json())


def _file(model: str, arithmetic: Arithmetic) -> str:
    return f"gate/{model}-in-{arithmetic.dtype}-on-{arithmetic.device}.json"
