"""What is kept of the chunks of a model that keeps states, each computed alone: under which name, and what is in it.

It is a stretch of one chunk behind the store's lead-in (`cache/stretches.py`), always raw: states are sums over many
tokens, whose errors every later token would meet. It is made by ingest, and by a question whose chunks lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvtool.core.cache.identity import chunk_id, ids_digest
from kvtool.core.cache.stretches import Place, StretchInfo
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.chain import fuse_chain
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.stretch import KEYS, VALUES, Found, NewStretch, Parts, encoded, kept_size
from kvtool.core.model.alone import Alone, Behind, compute_alone

if TYPE_CHECKING:
    import torch

    from kvtool.core.cache.store import Store
    from kvtool.core.cache.writer import Writer
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.session.identity import StoreIdentity


def stretch_id(identity: StoreIdentity, before: Sequence[int], ids: Ids) -> bytes:
    """Name of a prompt's segment: of the model, of the format it is kept in, of all ids before it and of its own."""
    return _id(identity, "states", ids_digest(before), ids)


def alone_id(identity: StoreIdentity, ids: Ids) -> bytes:
    """Name of a chunk that was computed behind the store's lead-in."""
    return _id(identity, "alone", identity.lead_in.digest(), ids)


def _id(identity: StoreIdentity, what: str, behind: bytes, ids: Ids) -> bytes:
    return chunk_id(
        namespace=identity.namespace,
        model_fingerprint=f"{identity.fingerprint} {what} in {identity.dtype}",
        lead_in=behind,
        token_ids=ids,
    )


@dataclass(frozen=True)
class AloneMaker:
    """Computes what is kept of chunks, and of the prompt's own beginning, for one store."""

    identity: StoreIdentity
    decoder: Decoder

    @cached_property
    def behind(self) -> Behind:
        """What chunks are computed behind."""
        return Behind(self.decoder, self.identity.lead_in.ids)

    def check_length(self, tokens: int) -> None:
        """Refuse a chunk of so many tokens where the model cannot hold it behind the lead-in. Raises UsageError."""
        behind = len(self.identity.lead_in.ids)
        self.decoder.check_length(behind + tokens, "use a shorter --lead-in or fewer --chunk-tokens")

    def chunk(self, ids: Ids) -> NewStretch:
        """Compute a chunk. Raises UsageError where the model cannot hold it behind the lead-in."""
        self.check_length(len(ids))
        lead = self.identity.lead_in.ids
        parts = _parts(compute_alone(self.decoder, self.behind, ids))
        info = StretchInfo(
            start=len(lead),
            tokens=len(ids),
            rows=tuple(layer for side, layer in parts if side == "rows"),
            states=tuple(layer for side, layer in parts if side == "state"),
            chunks=(self.identity.chunk_id(ids),),
            own=True,
            size=kept_size(parts, self.decoder.kv_dtype),
            alone=True,
            arithmetic=self.decoder.loaded.arithmetic,
        )
        return NewStretch(alone_id(self.identity, ids), 0, info, parts)

    def beginning(self) -> NewStretch:
        """Compute the prompt's own beginning, which is exact in every prompt."""
        identity = self.identity
        plan = build_plan(Candidate(identity.prefix, identity.prefix_id), [], ())
        found = Found((stretch_id(identity, (), identity.prefix),), (None,))
        return fuse_chain(self.decoder, plan, Prefix(), found, _nothing).new[0]


def keep_beginning(maker: AloneMaker, store: Store, writer: Writer) -> int:
    """Compute and store the prompt's own beginning where it is not; returns the bytes of its numbers."""
    identity = maker.identity
    known = found_in(store, stretch_id(identity, (), identity.prefix))
    if not identity.prefix or (known is not None and known.states):
        return 0
    made = maker.beginning()
    put(writer, made, maker.decoder.kv_dtype)
    return made.info.size


def found_in(store: Store, stretch: bytes) -> StretchInfo | None:
    """What is stored under a name; None: nothing, or it is damaged."""
    with suppress(DamagedError):
        return store.stretch(stretch)
    return None


def put(writer: Writer, stretch: NewStretch, kept: torch.dtype) -> None:
    """Store a stretch in a store of the format `kept`. Raises NoSpaceError."""
    writer.put_stretch(stretch.id, stretch.info, encoded(stretch.parts, kept))


def _parts(alone: Alone) -> Parts:
    parts: Parts = {("rows", layer): {KEYS: keys, VALUES: values} for layer, (keys, values) in alone.rows.items()}
    for layer, states in alone.states.items():
        parts["state", layer] = {f"{what} {number}": tensor for (what, number), tensor in states.items()}
    return parts


def _nothing(stretch: bytes, place: Place) -> memoryview:
    raise AssertionError("nothing is asked for")
