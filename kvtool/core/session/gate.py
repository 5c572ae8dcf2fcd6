"""The gate: a model's first meeting with a store checks that its fused caches are what full recompute gives.

This file holds the verdict and keeps it beside the store, one file a model; `session/laws.py` finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError, GateError
from kvtool.core.session.identity import StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.model.decoder import Decoder

GATE_FORMAT = 1
_LOOKED_AT = 8  # of the store's chunks, to find some that can be read


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


def gate_store(
    store: Store, decoder: Decoder, identity: StoreIdentity, chunks: Sequence[Ids] | None = None
) -> GateVerdict | None:
    """The verdict that the store keeps, or a new one; None if there is no chunk to check with.

    Parameters
    ----------
    chunks : token ids of those to check with; None: some of the store's.
    """
    verdict = stored_verdict(store, identity.fingerprint)
    if verdict is not None:
        return verdict
    chunks = _own_chunks(store, identity) if chunks is None else chunks
    if not chunks:
        return None
    from kvtool.core.session.laws import check_laws

    verdict = check_laws(decoder, identity.fingerprint, identity.prefix, chunks)
    write_side(store, _name(identity.fingerprint), verdict.to_json())  # else the gate is run again next time
    return verdict


def _own_chunks(store: Store, identity: StoreIdentity) -> list[Ids]:
    chunks = []
    for chunk_id in store.chunk_ids()[:_LOOKED_AT]:
        with contextlib.suppress(DamagedError):
            info = store.chunk_info(chunk_id)
            if info is not None and info.token_ids != identity.prefix:
                chunks.append(info.token_ids)
    return chunks


def _name(fingerprint: str) -> str:
    return f"gate/{fingerprint}.json"
