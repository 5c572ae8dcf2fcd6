"""Session: a store with its model, which answering, ingesting and measuring open and share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Self

from kvtool.core.cache.store import Store
from kvtool.core.common.machine import Arithmetic, product_dtype, why_float32
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import KvtoolError, ModelError
from kvtool.core.fusion.source import ChunkCache, KVSource, RecentChunks, StoreSource, held_on
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prompt import PromptParts
from kvtool.core.retrieval.finder import Finder
from kvtool.core.session.identity import (
    ConformanceResult,
    MeasuredLosses,
    ProfileCache,
    StoreIdentity,
    model_files,
    store_identity,
    stored_result,
)

if TYPE_CHECKING:
    from kvtool.core.checkpoint.files import ModelFiles
    from kvtool.core.common.timeline import Timeline
    from kvtool.core.common.types import Ids
    from kvtool.core.fusion.plan import Segment
    from kvtool.core.fusion.prefix_cache import StoredPrefix
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prefill import LeadIn
    from kvtool.core.session.learned import LearnedStore
    from kvtool.core.session.speeds import SpeedBook

_STORES_OWN = ModelOptions()


class Session:
    """A store with its model and what is measured and cached of it, each made at its first use; :meth:`refresh` follows
    other writers. Threads may share a session: one that runs the model holds `lock`, since selectors hook into the
    model. `identity`: of the store that is being made; None: the manifest's. `gradients`: the model is not packed for
    speed. `timeline`: None: nothing is timed. `say`: reports that speeds are about to be measured, which takes seconds.
    `recent_chunks`: None without :meth:`cache_chunks`. `learned`: None without :meth:`learn`."""

    def __init__(
        self,
        store: Store,
        wanted: ModelOptions = _STORES_OWN,
        *,
        identity: StoreIdentity | None = None,
        gradients: bool = False,
        decoder: Decoder | None = None,
        warn: Warn = warn_nobody,
    ) -> None:
        self.store, self.identity = store, identity or store_identity(store)
        self.warn, self.warn_once = warn, cache(warn)
        self._wanted, self._gradients = wanted, gradients
        self.lock = threading.RLock()
        self.timeline: Timeline | None = None
        self.say: Callable[[str], None] = lambda text: None
        self.profiles = ProfileCache(store)
        self.losses = MeasuredLosses(store)
        self.recent_chunks: RecentChunks | None = None
        self.learned: LearnedStore | None = None
        self._conformance: ConformanceResult | None = None
        self._revision = -1  # of the store, at the last refresh
        if decoder is not None:
            self.decoder = decoder

    @classmethod
    def open(cls, store: Store, wanted: ModelOptions = _STORES_OWN, *, warn: Warn = warn_nobody) -> Self:
        """Open a session with its model loaded. Raises StoreNotFoundError: the store is empty; ModelError: the wanted
        model is not the store's, or cannot be loaded."""
        session = cls(store, wanted, warn=warn)
        _ = session.decoder
        return session

    def refresh(self) -> None:
        """Reload what other writers have changed. Raises ModelError: the store was made anew with another model;
        StoreFormatError: the store was replaced by another one."""
        revision = self.store.revision()
        if revision == self._revision:
            return
        identity = store_identity(self.store)
        if identity.fingerprint != self.identity.fingerprint:
            raise ModelError(f"the store at {self.store.path} is another model's now", "open it again")
        if identity != self.identity:
            self.identity = identity
            self.__dict__.pop("lead_in", None)
            if self.learned is not None:
                self.learned.identity = identity
        self.losses = MeasuredLosses(self.store)
        if isinstance(source := self.__dict__.get("source"), ChunkCache):
            source.recheck()
        self._revision = revision

    @cached_property
    def files(self) -> ModelFiles:
        return model_files(self.identity, self._wanted, self.store.made_by())

    @property
    def is_loaded(self) -> bool:
        return "decoder" in self.__dict__

    @cached_property
    def decoder(self) -> Decoder:
        """Load the model at the first use. KV is stored in the store's number format. The model computes in the format
        that this machine is fast in, unless the user names one. Raises ModelError."""
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
        """Arithmetic of the model on this machine, loaded or not. Raises ModelError, UsageError."""
        if self.is_loaded:
            return self.decoder.loaded.arithmetic
        from kvtool.core.checkpoint.load import resolve_device, resolve_dtype

        device = resolve_device(self._wanted.device)
        return Arithmetic(resolve_dtype(self._wanted.dtype, device, self.files), device.partition(":")[0])

    @cached_property
    def tokenizer(self) -> Any:
        from kvtool.core.checkpoint.load import load_tokenizer

        return self.decoder.loaded.tokenizer if self.is_loaded else load_tokenizer(self.files)

    @cached_property
    def layers(self) -> int:
        from kvtool.core.checkpoint.load import supported_config
        from kvtool.core.checkpoint.support import kept_layers

        return self.decoder.stored_layers if self.is_loaded else kept_layers(supported_config(self.files))

    @property
    def parts(self) -> PromptParts:
        return PromptParts(self.identity.prefix, self.identity.answer_header)

    @cached_property
    def lead_in(self) -> LeadIn:
        from kvtool.core.model.prefill import LeadIn

        return LeadIn(self.decoder, self.identity.lead_in.ids)

    def check_gate(self, chunk_ids: Sequence[bytes] = ()) -> bool:
        """Run the conformance checks at a model's first use of the store, and compare those of `chunk_ids` that another
        arithmetic has made with this one's own records. False: they could not be compared, so none of them can be read.
        Raises GateError, with the measured numbers."""
        if self._conformance is None:
            is_known = not self.is_loaded or self.decoder.loaded.fingerprint
            stored = stored_result(self.store, self.identity.fingerprint, self.arithmetic) if is_known else None
            if stored is None:
                from kvtool.core.session.gate import gate_store

                stored = gate_store(self.store, self.decoder, self.identity)
            self._conformance = stored
        if self._conformance is None:
            return False
        own, makers = {None, self.arithmetic}, self.store.arithmetics(chunk_ids)
        if not self.identity.keeps_states and not own.union(self._conformance.compared).issuperset(makers):
            from kvtool.core.session.gate import cross_dtype_records

            self._conformance = cross_dtype_records(
                self.store, self.decoder, self.identity, self._conformance, chunk_ids
            )
        self._conformance.enforce()
        return own.union(self._conformance.compared).issuperset(makers)

    def check_prefix(self, segments: Sequence[Ids], found: StoredPrefix) -> None:
        """Compare a prompt's stored prefix of another arithmetic with this one's own, at its first use. `segments`:
        token ids of the prompt's segments, of which `found` are the checkpoints. Raises GateError."""
        if self._conformance is not None:
            from kvtool.core.session.gate import cross_dtype_prefix

            self._conformance = cross_dtype_prefix(self.store, self.decoder, self._conformance, segments, found)
            self._conformance.enforce()

    @cached_property
    def finder(self) -> Finder:
        return Finder(self.store, self.warn)

    @cached_property
    def source(self) -> KVSource:
        return StoreSource(self.store, self.decoder, self.profiles)

    @cached_property
    def speeds(self) -> SpeedBook:
        from kvtool.core.session.speeds import SpeedBook

        return SpeedBook(self.store, self.decoder, self.identity.fingerprint, self.say)

    def cache_chunks(self, limit: int) -> None:
        """Cache loaded chunks in memory, up to `limit` bytes, and prefer them on ties of score."""
        self.source = ChunkCache(self.source, limit, self.store.record_mark, held_on(self.decoder))
        self.recent_chunks = RecentChunks(limit)

    def learn(self, budget: int, owners: Collection[str] | None = None) -> None:
        """Open the store of learned passages, of at most `budget` bytes, and keep those of `owners` (None: all)."""
        from kvtool.core.session.learned import LearnedStore

        self.identity.check_movable("--learn")
        self.learned = LearnedStore(self.store.uuid, self.identity, self.decoder, budget, self.warn_once)
        self.store.more = self.learned.store
        try:
            self.learned.trim(owners)
        except (KvtoolError, OSError) as error:  # questions can be answered, and the next passage makes room
            hint = f"start again, or stop the store's servers and remove {self.learned.store.path}"
            self.warn_once(f"the learned passages could not be trimmed: {error}", hint)

    def close(self) -> None:
        if self.learned is not None:
            self.learned.close()
        self.learned = self.store.more = None
        self.store.close()

    def holds(self, segment: Segment) -> bool:
        source = self.__dict__.get("source")  # a new source holds nothing, and would load the model
        return isinstance(source, ChunkCache) and source.holds(segment, self.layers)
