"""What the gate finds of what another arithmetic has made, when it is first used: law 6, in each of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.fusion.stretch import Found
from kvtool.core.model.decoder import Decoder
from kvtool.core.session.gate import GateVerdict, keep_verdict
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.laws import TOLERANCE, roughest
from kvtool.core.session.record_law import Held, check_records, chunks_of
from kvtool.core.session.stretch_law import check_beginning, made_beginning

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


def gate_records(
    store: Store, decoder: Decoder, identity: StoreIdentity, verdict: GateVerdict, chunk_ids: Sequence[bytes]
) -> GateVerdict:
    """The verdict with what it lacks of records among these that another arithmetic has made; it is kept."""

    def check(made: Arithmetic, allowed: float) -> Held | None:
        chunks = chunks_of(store, identity, made, chunk_ids, decoder.stored_layers)
        return check_records(store, decoder, identity, made, chunks, allowed) if chunks else None

    return _with_others(store, decoder, verdict, store.arithmetics(chunk_ids), check)


def gate_beginning(
    store: Store, decoder: Decoder, verdict: GateVerdict, segments: Sequence[Ids], found: Found
) -> GateVerdict:
    """The verdict with what it lacks of a prompt's stored beginning that another arithmetic has made; it is kept."""

    def check(made: Arithmetic, allowed: float) -> Held | None:
        count = made_beginning(segments, found, made)
        some, read = found.of(range(count)), store.read_part
        return check_beginning(decoder, segments[:count], some, made, read, allowed) if count else None

    makers = (info.arithmetic for info in found.infos[: found.usable] if info)
    return _with_others(store, decoder, verdict, makers, check)


def _with_others(
    store: Store,
    decoder: Decoder,
    verdict: GateVerdict,
    makers: Iterable[Arithmetic | None],
    check: Callable[[Arithmetic, float], Held | None],
) -> GateVerdict:
    """The verdict with what it lacks of these makers, as `check` finds it; kept where something was found."""
    own, found = decoder.loaded.arithmetic, verdict
    for made in sorted({maker for maker in makers if maker not in (None, own)}):
        if made in verdict.compared:
            continue
        measured = check(made, roughest(TOLERANCE, decoder, getattr(torch, made.dtype)))
        if measured is not None:
            others = found.of_others | {str(made): measured[1]}
            found = replace(found, checks=(*found.checks, measured[0]), of_others=others)
    if found is not verdict:
        keep_verdict(store, found, own)
    return found
