"""The gate's verdicts, kept beside the store, one file a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.common.types import Ids
from kvtool.core.session.identity import StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.session.gate import Verdict

_QUESTION: Ids = (11, 7, 5, 3, 2)  # any ids do: the laws hold for all


def stored_verdict(store: Store, fingerprint: str) -> Verdict | None:
    """What the gate found for a model at its first meeting with this store; None before that."""
    from kvtool.core.session.gate import GATE_FORMAT, Verdict

    try:
        return Verdict.from_json(read_side(store, _name(fingerprint), format=GATE_FORMAT))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or unreadable: the gate is run again


def gate_store(store: Store, decoder: Decoder, identity: StoreIdentity, chunks: Sequence[Ids]) -> Verdict | None:
    """The kept verdict, or a new one from some of the store's chunks; None if there is no chunk to check with."""
    verdict = stored_verdict(store, identity.fingerprint)
    if verdict is not None or not chunks:
        return verdict
    from kvtool.core.session.gate import run_gate

    verdict = run_gate(decoder, identity.fingerprint, identity.prefix, chunks, _QUESTION)
    write_side(store, _name(identity.fingerprint), verdict.to_json())  # else the gate is run again next time
    return verdict


def _name(fingerprint: str) -> str:
    return f"gate/{fingerprint}.json"
