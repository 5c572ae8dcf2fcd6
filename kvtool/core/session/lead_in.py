"""The lead-in of a store as the model sees it: its token ids' own rows, or the learned ones that the store keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError, ModelError, UsageError
from kvtool.core.session.identity import NEIGHBOUR, LeadInIds, StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.learned import LearnedRows
    from kvtool.core.model.prefill import LeadIn
    from kvtool.core.records.encode import LeadIns

LEARNED = "learned"
_FIT = "run `kvtool fit lead-in`"


def learned_lead_in(store: Store | None, fingerprint: str, ids: Ids) -> LeadInIds:
    """The store's learned lead-in, by its digest; needs no torch.

    Parameters
    ----------
    fingerprint, ids : the model, and the token ids whose places the rows have to take.

    Raises
    ------
    UsageError : nothing has been learned for this store, or it was behind another instruction.
    ModelError : it was learned for another model.
    """
    state = store.lead_in_state() if store is not None else {}
    if not state:
        raise UsageError("no lead-in has been learned for this store", f"ingest with --lead-in warm, then {_FIT}")
    if state.get("fingerprint") != fingerprint:
        raise ModelError("the store's learned lead-in is another model's", _FIT)
    if state.get("ids") != list(ids):
        raise UsageError("the store's lead-in was learned behind another instruction", f"{_FIT} for this one")
    return LeadInIds(LEARNED, ids, str(state.get("digest", "")))


def learned_rows(store: Store, digest: str) -> LearnedRows:
    """The rows of this digest.

    Raises
    ------
    DamagedError : they are damaged, or lost.
    """
    from kvtool.core.model.learned import LearnedRows

    data = store.learned(bytes.fromhex(digest))
    if data is None:
        raise DamagedError("the rows of the learned lead-in are lost", f"{_FIT}, then ingest with --lead-in learned")
    rows = LearnedRows.from_bytes(data)
    if rows.digest != digest:
        raise DamagedError("the rows of the learned lead-in are not those of their digest", "restore the store")
    return rows


def open_lead_in(store: Store, decoder: Decoder, wanted: LeadInIds) -> LeadIn:
    """The lead-in that chunks are prefilled behind.

    Raises
    ------
    DamagedError : its learned rows are damaged or lost.
    ModelError : they are another model's.
    """
    from kvtool.core.model.prefill import LeadIn

    if not wanted.rows:
        return LeadIn(decoder, wanted.ids)
    rows = learned_rows(store, wanted.rows)
    own = decoder.plain_shape
    shape = None if own is None else (len(decoder.layers), own.heads, len(wanted.ids), own.key_dim)
    fits = rows.fingerprint == decoder.loaded.fingerprint and rows.ids == wanted.ids
    if not fits or rows.keys.shape != shape or rows.keys.dtype != decoder.kv_dtype:
        raise ModelError("the learned lead-in is another model's", _FIT)
    layers = [
        (keys.to(decoder.device, decoder.dtype), values.to(decoder.device, decoder.dtype))
        for keys, values in rows.layers()
    ]
    return LeadIn(decoder, wanted.ids, layers)


def open_lead_ins(store: Store, decoder: Decoder, identity: StoreIdentity) -> LeadIns:
    """The lead-in, and the other one that the sensitivity of chunks is measured against; raises what `open_lead_in`
    does."""
    from kvtool.core.model.prompt import PromptParts
    from kvtool.core.records.encode import LeadIns, other_lead_in

    wanted, parts = identity.lead_in, PromptParts(identity.prefix, identity.answer_header)
    own = open_lead_in(store, decoder, wanted)
    return LeadIns(own, other_lead_in(decoder, parts, wanted.ids, wanted.mode != NEIGHBOUR))
