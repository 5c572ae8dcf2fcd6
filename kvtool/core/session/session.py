"""Hold a store with its model: what answering, ingesting and measuring all open, and share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Self

from kvtool.core.cache.store import Store
from kvtool.core.common.arithmetic import Arithmetic, product_dtype, why_float32
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import ModelError
from kvtool.core.fusion.chunk_cache import ChunkCache, RecentChunks, held_on
from kvtool.core.fusion.source import KVSource, StoreSource
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prompt import PromptParts
from kvtool.core.retrieval.finder import Finder
from kvtool.core.session.gate import ConformanceResult, stored_result
from kvtool.core.session.identity import LEARNED, StoreIdentity, model_files, store_identity
from kvtool.core.session.levels import MeasuredLosses, ProfileCache

if TYPE_CHECKING:
    from kvtool.core.checkpoint.files import ModelFiles
    from kvtool.core.common.timeline import Timeline
    from kvtool.core.common.types import Ids
    from kvtool.core.fusion.plan import Segment
    from kvtool.core.fusion.state_checkpoint import StoredPrefix
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prefill import LeadIn
    from kvtool.core.session.speeds import SpeedBook

_STORES_OWN = ModelOptions()
_OLD_LEAD_IN = (
    "the store's chunks were computed behind a learned lead-in, which kvtool no longer makes; they are used as stored",
    "the next `kvtool ingest` of their documents computes them behind the warm lead-in",
)


class Session:
    """Holds a store and what belongs to it: the model, its lead-in, codec profiles and losses, the gate's result, this
    machine's speeds, the search index and the place where KV is read. It does nothing with them.

    All of that is made at its first use and kept; :meth:`refresh` takes in what other writers changed. Threads may
    share a session: what runs the model holds `lock`, since selectors hook into it.

    Parameters
    ----------
    wanted : the model as the user names it, and where it is to run.
    identity : what the store is about to be made with; None: what it was made with.
    gradients : they will be asked for; a model that is only run forward is laid out for speed.
    decoder : the store's model where it is loaded already.
    warn : told what the user should know although the work goes on.

    Raises
    ------
    StoreNotFoundError : nothing was ever ingested into the store.

    Attributes
    ----------
    lock : held by the thread that runs the model.
    warn_once : as `warn`, but what was said is not said again, though every question would.
    timeline : collects what ran when; None: nobody wants to know.
    say : told before the machine's speeds are measured, which takes seconds.
    recent_chunks : the chunks that need not be read again; None where nothing is kept.
    """

    def __init__(
        self,
        store: Store,
        wanted: ModelOptions = _STORES_OWN,
        *,
        identity: StoreIdentity | None = None,
        gradients: bool = False,
        decoder: Decoder | None = None,
        warn: Warn = warn_nobody,
        lock_wait: float = 0.0,
    ) -> None:
        self.store, self.identity = store, identity or store_identity(store)
        self.warn, self.warn_once, self.lock_wait = warn, cache(warn), lock_wait
        self._wanted, self._gradients = wanted, gradients
        self.lock = threading.RLock()
        self.timeline: Timeline | None = None
        self.say: Callable[[str], None] = lambda text: None
        self.profiles = ProfileCache(store)
        self.losses = MeasuredLosses(store)
        self.recent_chunks: RecentChunks | None = None
        self._conformance: ConformanceResult | None = None
        self._revision = -1  # of what was read of the store before this
        if decoder is not None:
            self.decoder = decoder
        if self.identity.lead_in.mode == LEARNED:
            self.warn_once(*_OLD_LEAD_IN)

    @classmethod
    def open(
        cls,
        store: Store,
        wanted: ModelOptions = _STORES_OWN,
        *,
        gradients: bool = False,
        warn: Warn = warn_nobody,
    ) -> Self:
        """A session whose model is loaded.

        Raises
        ------
        StoreNotFoundError : nothing was ever ingested into the store.
        ModelError : the model that is wanted is another than the store's, or cannot be loaded.
        """
        session = cls(store, wanted, gradients=gradients, warn=warn)
        _ = session.decoder
        return session

    def refresh(self) -> None:
        """Take in what the store says of itself now; where nothing has changed this costs one look.

        Raises
        ------
        ModelError : it was made anew with another model.
        StoreFormatError : another store stands in its place.
        """
        revision = self.store.revision()
        if revision == self._revision:
            return
        identity = store_identity(self.store)
        if identity.fingerprint != self.identity.fingerprint:
            raise ModelError(f"the store at {self.store.path} is another model's now", "open it again")
        if identity != self.identity:
            self.identity = identity
            self.__dict__.pop("lead_in", None)
        self.losses = MeasuredLosses(self.store)
        if isinstance(source := self.__dict__.get("source"), ChunkCache):
            source.recheck()
        self._revision = revision

    # ---- the model ----

    @cached_property
    def files(self) -> ModelFiles:
        """The model's files. Raises ModelError where they are another model's than the store's."""
        return model_files(self.identity, self._wanted, self.store.made_by())

    @property
    def is_loaded(self) -> bool:
        """Whether the model is in memory."""
        return "decoder" in self.__dict__

    @cached_property
    def decoder(self) -> Decoder:
        """The model, loaded at the first use. Raises ModelError.

        A store's numbers stay in the store's format. What the model computes in follows from what it was published in
        and from what this machine is fast in, unless the user names it.
        """
        import torch

        from kvtool.core.checkpoint.load import load_model, resolve_device
        from kvtool.core.model.decoder import Decoder

        device, dtype, arithmetic = resolve_device(self._wanted.device), self.identity.dtype, self.arithmetic.dtype
        if arithmetic != product_dtype(arithmetic, device):
            self.warn(f"{why_float32(arithmetic)}, and float32 is many times as fast", "leave --dtype out")
        loaded = load_model(self.files, device=device, dtype=dtype, arithmetic=arithmetic, packed=not self._gradients)
        return Decoder(loaded, kv_dtype=getattr(torch, dtype))

    @property
    def arithmetic(self) -> Arithmetic:
        """What the model computes in here; where it is not loaded, what it would. Raises ModelError, UsageError."""
        if self.is_loaded:
            return self.decoder.loaded.arithmetic
        from kvtool.core.checkpoint.load import resolve_device, resolve_dtype

        device = resolve_device(self._wanted.device)
        return Arithmetic(resolve_dtype(self._wanted.dtype, device, self.files), device.partition(":")[0])

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, which needs no loaded model."""
        from kvtool.core.checkpoint.load import load_tokenizer

        return self.decoder.loaded.tokenizer if self.is_loaded else load_tokenizer(self.files)

    @cached_property
    def layers(self) -> int:
        """How many layers have records of a chunk: one that is stored with another number is not this model's."""
        from kvtool.core.checkpoint.load import supported_config
        from kvtool.core.checkpoint.support import kept_layers

        return self.decoder.stored_layers if self.is_loaded else kept_layers(supported_config(self.files))

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """How many positions a row sees at each layer that has records; None: all before it. Where the model is not
        loaded this is what its configuration states."""
        from kvtool.core.checkpoint.load import supported_config
        from kvtool.core.model.kinds import stated_windows

        if self.is_loaded:
            return self.decoder.windows
        return stated_windows(supported_config(self.files), self.layers)

    @property
    def parts(self) -> PromptParts:
        """The store's own beginning of a prompt, and its answer header."""
        return PromptParts(self.identity.prefix, self.identity.answer_header)

    @cached_property
    def lead_in(self) -> LeadIn:
        """What chunks are prefilled behind."""
        from kvtool.core.model.prefill import LeadIn

        return LeadIn(self.decoder, self.identity.lead_in.ids)

    @cached_property
    def unused_states(self) -> int:
        """How many chunks have states of their own, as an earlier kvtool computed them behind a lead-in."""
        if not (self.identity.keeps_states and self.identity.lead_in.ids):
            return 0
        return sum(info.alone for info in self.store.stretches().values())

    def check_gate(self, chunk_ids: Sequence[bytes] = ()) -> None:
        """Run the gate at a model's first meeting with the store, and refuse the model if it failed.

        Parameters
        ----------
        chunk_ids : of those that are about to be used: the first of them that another arithmetic has made are held
            against what is made here.

        Raises
        ------
        GateError : with the measured numbers.
        """
        if self._conformance is None:
            self._conformance = stored_result(self.store, self.identity.fingerprint, self.arithmetic) or self._meet()
        if self._conformance is None:
            return
        known = {None, self.arithmetic, *self._conformance.compared}
        if not self.identity.keeps_states and not known.issuperset(self.store.arithmetics(chunk_ids)):
            from kvtool.core.session.gate_checks import gate_records

            self._conformance = gate_records(self.store, self.decoder, self.identity, self._conformance, chunk_ids)
        self._conformance.enforce()

    def check_beginning(self, segments: Sequence[Ids], found: StoredPrefix) -> None:
        """Hold what another arithmetic has made of a prompt's beginning against what is made here, when it is first
        used.

        Parameters
        ----------
        segments : token ids of the prompt's segments; `found` tells what is stored of each.

        Raises
        ------
        GateError : with the measured numbers.
        """
        if self._conformance is not None:
            from kvtool.core.session.gate_checks import gate_beginning

            self._conformance = gate_beginning(self.store, self.decoder, self._conformance, segments, found)
            self._conformance.enforce()

    def _meet(self) -> ConformanceResult | None:
        from kvtool.core.session.gate_checks import gate_store

        return gate_store(self.store, self.decoder, self.identity)

    # ---- reading ----

    @cached_property
    def finder(self) -> Finder:
        """What finds chunks: the search index, and the vectors if there are any."""
        return Finder(self.store, self.warn)

    @cached_property
    def source(self) -> KVSource:
        """Where KV is read: the store, behind a memory of what was read if :meth:`cache_chunks` was called."""
        return StoreSource(self.store, self.decoder, self.profiles)

    @cached_property
    def speeds(self) -> SpeedBook:
        """How fast this machine computes and loads."""
        from kvtool.core.session.speeds import SpeedBook

        return SpeedBook(self.store, self.decoder, self.identity.fingerprint, self.say)

    def cache_chunks(self, limit: int) -> None:
        """Hold what is loaded, up to `limit` bytes, for the questions to come, and prefer it on ties of score."""
        self.source = ChunkCache(self.source, limit, self.store.record_mark, held_on(self.decoder))
        self.recent_chunks = RecentChunks(limit)

    def holds(self, segment: Segment) -> bool:
        """Whether all of a segment's KV is held in memory."""
        source = self.__dict__.get("source")  # one that is not there yet holds nothing, and would load the model
        return isinstance(source, ChunkCache) and source.holds(segment, self.layers)
