"""Identify a store by what it is made with: model, the prompt's fixed parts, lead-in, and how documents are split."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import chunk_id, ids_digest
from kvtool.core.cache.origin import HERE, Origin
from kvtool.core.checkpoint.files import ModelFiles, Once, unnoticed
from kvtool.core.checkpoint.fingerprint import model_fingerprint
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.support import ONLY_EXACTLY
from kvtool.core.common.types import Ids
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import ModelError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.model.options import DEFAULT_MODEL, EARLIER_SYSTEM, ModelOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.records.encode import LeadIns

NEIGHBOUR = "neighbour"
# Stores of earlier versions may have a lead-in of trained rows, which are no longer computed with. Its chunks have
# another lead-in digest than its token ids give, so they count as chunks behind an earlier lead-in of the store: used
# as they are stored, and computed again by the next ingest of their documents.
LEARNED = "learned"


@dataclass(frozen=True, slots=True)
class LeadInIds:
    """What stands before every chunk when it is prefilled.

    Attributes
    ----------
    mode : `warm`, `prefix`, `neighbour`, `bos`, `sink:N`, `none` or the name of a file; or `LEARNED`.
    ids : token ids shared by all chunks; `neighbour` adds the document's chunk before.
    """

    mode: str
    ids: Ids

    def digest(self, before: Ids = ()) -> bytes:
        """Digest of what a chunk is prefilled behind; `before` are the chunk's own ids."""
        return ids_digest([*self.ids, *before])


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Kept in the store's manifest; a chunk's id follows from it and the chunk's token ids.

    Attributes
    ----------
    fingerprint : of the model's weights, configuration and tokenizer, and of `dtype`.
    dtype : the number format that keys and values are kept in; what computes them is the machine's choice.
    prefix : token ids before the first chunk of a prompt, as they were when the store was made.
    answer_header : token ids after the question.
    system : the instruction they were made from.
    keeps_states : the model keeps a recurrent state, so that only a prompt's beginning can be reused
        (fusion/prefix_cache.py).
    """

    model: str
    fingerprint: str
    dtype: str
    prefix: Ids
    answer_header: Ids
    lead_in: LeadInIds
    split: SplitSettings
    system: str = EARLIER_SYSTEM
    namespace: str = ""
    keeps_states: bool = False

    def chunk_id(self, ids: Ids, before: Ids = ()) -> bytes:
        """Id of a chunk behind this lead-in (and `before`, its own part of it)."""
        return self._id(ids, self.lead_in.digest(before))

    def wanted(self, ids: Ids, before: Ids = ()) -> ChunkSpec:
        """A chunk behind this lead-in, as it is to be made."""
        return ChunkSpec(self.chunk_id(ids, before), ids, before, self.lead_in.digest(before))

    @property
    def most_tokens(self) -> int:
        """Return how many tokens a chunk has at the very most: what follows its text, and a cut at the next good place,
        may take it beyond what it was split by."""
        return 2 * self.split.max_tokens + 64

    def check_movable(self, what: str) -> None:
        """Refuse what needs chunks that can stand anywhere. Raises UsageError."""
        if self.keeps_states:
            needed = "that would need a state that is the same wherever its chunk stands"
            raise UsageError(
                f"{what} needs chunks that can be moved, and {self.model} keeps a recurrent state; {needed}",
                f"{ONLY_EXACTLY}, which take no such chunks",
            )

    @property
    def wanted_prefix(self) -> ChunkSpec:
        """The prompt's beginning, as it is to be made."""
        return ChunkSpec(self.prefix_id, self.prefix, (), ids_digest([]))

    @property
    def prefix_id(self) -> bytes:
        """Id of the record that holds the prompt's beginning; nothing stands before it."""
        return self._id(self.prefix, ids_digest([]))

    def _id(self, ids: Ids, lead_in: bytes) -> bytes:
        return chunk_id(namespace=self.namespace, model_fingerprint=self.fingerprint, lead_in=lead_in, token_ids=ids)

    def settings_digest(self) -> str:
        """Digest of all that decides which chunks a file gives; a file's entry carries it."""
        text = json.dumps([self.fingerprint, self.namespace, asdict(self.split), asdict(self.lead_in)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_manifest(self) -> dict[str, Any]:
        """The identity as JSON values; where no states are kept they are those of stores that knew of none."""
        row = asdict(self)
        if not self.keeps_states:
            del row["keeps_states"]
        return {"identity": row}

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> StoreIdentity | None:
        """The identity in a store's manifest; None in a new store."""
        if "identity" not in manifest:
            return None
        try:
            row = dict(manifest["identity"])
            lead_in = LeadInIds(row["lead_in"]["mode"], tuple(row["lead_in"]["ids"]))
            split = SplitSettings(**row["split"])
            ids = {name: tuple(row[name]) for name in ("prefix", "answer_header")}
            said = {"system": row.get("system") or EARLIER_SYSTEM}
            return cls(**(row | ids | said | {"lead_in": lead_in, "split": split}))
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFormatError(
                f"the store's manifest cannot be read: {error!r}", "it was written by another version of kvtool"
            ) from error


def store_identity(store: Store) -> StoreIdentity:
    """What a store was made with.

    Raises
    ------
    StoreNotFoundError : nothing was ever ingested into it.
    """
    identity = StoreIdentity.from_manifest(store.manifest())
    if identity is None:
        raise StoreNotFoundError(f"the store at {store.path} is empty", "run `kvtool ingest PATH` first")
    return identity


def lead_ins_of(identity: StoreIdentity, decoder: Decoder) -> LeadIns:
    """Compute a store's lead-in, and the other one that the sensitivity of chunks is measured against."""
    from kvtool.core.model.prefill import LeadIn
    from kvtool.core.model.prompt import PromptParts
    from kvtool.core.records.encode import LeadIns, other_lead_in

    wanted, parts = identity.lead_in, PromptParts(identity.prefix, identity.answer_header)
    other = other_lead_in(decoder, parts, wanted.ids, wanted.mode != NEIGHBOUR)
    return LeadIns(LeadIn(decoder, wanted.ids), other)


def model_files(identity: StoreIdentity, wanted: ModelOptions, made_by: Origin = HERE) -> ModelFiles:
    """The files of a store's model, wherever the user has it now: by default where it was.

    Parameters
    ----------
    made_by : who named the model that the store was made with.

    Raises
    ------
    ModelError : they cannot be found, or are another model's.
    """
    files = resolve_named(wanted.model, identity.model, made_by, wanted.offline)
    check_same_model(files, identity)
    return files


def resolve_named(asked: str | None, stored: str, made_by: Origin, offline: bool, once: Once = unnoticed) -> ModelFiles:
    """Find the model that the user asks for, else the one that a store names.

    One that somebody else has named is not fetched from anywhere without the user's word.

    Raises
    ------
    ModelError : as `resolve`; or it would have to be fetched.
    """
    if asked or stored == DEFAULT_MODEL or not made_by.is_foreign:
        return resolve(asked or stored, offline=offline, once=once)
    try:
        return resolve(stored, offline=True, once=once)
    except ModelError as error:
        what = f"the model {stored}, which {made_by.name} names, is not on this machine"
        raise ModelError(what, f"if you want it, say so: --model {shlex.quote(stored)}") from error


def check_same_model(files: ModelFiles, known: StoreIdentity) -> None:
    """Refuse a model other than the one a store was built with.

    Raises
    ------
    ModelError : weights, configuration or tokenizer differ.
    """
    if model_fingerprint(files, known.dtype) != known.fingerprint:
        raise ModelError(
            f"the store was built with another model than {files.ref} (it was {known.model})",
            "use that model, or another --store for this one",
        )
