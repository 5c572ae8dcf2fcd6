"""Session: a store with its model, which answering, ingesting and measuring open and share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.store import Store
from kvtool.core.common.machine import Arithmetic, product_dtype, why_float32
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import GateError, KvtoolError, ModelError
from kvtool.core.fusion.source import ChunkCache, KVSource, RecentChunks, StoreSource, held_on
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prompt import PromptParts
from kvtool.core.retrieval.finder import Finder
from kvtool.core.session.identity import (
    ConformanceResult,
    MeasuredLosses,
    ProfileCache,
    StoreIdentity,
    lead_ins_of,
    model_files,
    store_identity,
    stored_result,
)

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkSpec
    from kvtool.core.checkpoint.files import ModelFiles
    from kvtool.core.common.types import Ids, Timeline
    from kvtool.core.fusion.plan import Segment
    from kvtool.core.fusion.prefix_cache import StoredPrefix
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.records.encode import LeadIns
    from kvtool.core.session.learned import LearnedStore
    from kvtool.core.session.speeds import SpeedBook

_STORES_OWN = ModelOptions()


class StoreModel:
    """The model of a store; tokenizer and configuration are read without the weights. `decoder`: it is loaded already.
    `gradients`: its weights are not packed for speed. `checks_later`: the comparison with transformers, which takes
    seconds at a model's first use, waits until KV is reused or stored. Members raise ModelError and UsageError."""

    def __init__(
        self,
        store: Store,
        identity: StoreIdentity,
        options: ModelOptions,
        warn: Warn,
        decoder: Decoder | None = None,
        gradients: bool = False,
        checks_later: bool = False,
    ) -> None:
        self._store, self._identity, self._options, self._warn = store, identity, options, warn
        self._decoder, self._gradients, self._checks_later = decoder, gradients, checks_later

    @cached_property
    def files(self) -> ModelFiles:
        return model_files(self._identity, self._options, self._store.made_by())

    @property
    def is_loaded(self) -> bool:
        return self._decoder is not None

    @property
    def decoder(self) -> Decoder:
        """Load the model at the first use. KV is stored in the store's number format. The model computes in the format
        that this machine is fast in, unless the user names one."""
        if self._decoder is None:
            self._decoder = self._load()
        return self._decoder

    def _load(self) -> Decoder:
        import torch

        from kvtool.core.checkpoint.load import load_model, resolve_device
        from kvtool.core.model.decoder import Decoder
        from kvtool.core.model.hf.check import stored_check, why_not_served

        device, dtype, arithmetic = resolve_device(self._options.device), self._identity.dtype, self.arithmetic.dtype
        if arithmetic != product_dtype(arithmetic, device):
            self._warn(f"{why_float32(arithmetic)}, and float32 is many times as fast", "leave --dtype out")

        def load(listed: bool) -> Decoder:
            loaded = load_model(
                self.files, device=device, dtype=dtype, arithmetic=arithmetic, packed=not self._gradients, listed=listed
            )
            return Decoder(loaded, kv_dtype=getattr(torch, dtype))

        decoder = load(listed=True)
        why = stored_check(decoder) if self._checks_later else why_not_served(decoder)
        self._checks_later = why is None
        if why:
            self._warn(f"transformers computes this model: {why}", "answers are the same, and slower")
            decoder = load(listed=False)
        return decoder

    def check_forward(self) -> None:
        """Compare the model with transformers' if that was put off. Raises GateError: they differ."""
        if self.is_loaded and self._checks_later:
            from kvtool.core.model.hf.check import why_not_served

            self._checks_later = False
            if why := why_not_served(self.decoder):
                raise GateError(
                    f"this model computes otherwise than transformers: {why}",
                    "ask again: transformers computes it from now on",
                )

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic of the model on this machine, loaded or not."""
        if self._decoder is not None:
            return self._decoder.loaded.arithmetic
        from kvtool.core.checkpoint.load import resolve_device, resolve_dtype

        device = resolve_device(self._options.device)
        return Arithmetic(resolve_dtype(self._options.dtype, device, self.files), device.partition(":")[0])

    @cached_property
    def tokenizer(self) -> Any:
        from kvtool.core.checkpoint.load import load_tokenizer

        return load_tokenizer(self.files) if self._decoder is None else self._decoder.loaded.tokenizer

    @cached_property
    def layers(self) -> int:
        from kvtool.core.checkpoint.load import supported_config
        from kvtool.core.checkpoint.support import kv_layers

        return kv_layers(supported_config(self.files)) if self._decoder is None else self._decoder.stored_layers


@dataclass(slots=True)
class StoreState:
    """What is read of a store, and changes with it; `revision`: of the store when it was read. `lead_ins`,
    `conformance`: None until they are computed."""

    identity: StoreIdentity
    losses: MeasuredLosses
    revision: int = -1
    lead_ins: LeadIns | None = None
    conformance: ConformanceResult | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Session:
    """A store with its model. Only `state` changes, by :meth:`refresh` and by measuring. Threads may share a session:
    one that runs the model holds `lock`. `memory_cache`: bytes of loaded chunks
    that stay in memory; None: none stay. `recent_chunks`: chunks that win ties of score; None: none do. `say`: reports
    that speeds are about to be measured, which takes seconds. `timeline`: None: nothing is timed. `missed`: chunks
    without KV that questions have computed in place, which someone else is to store; None: they are stored at once."""

    store: Store
    model: StoreModel
    state: StoreState
    finder: Finder
    warn: Warn = warn_nobody
    say: Callable[[str], None] = lambda text: None
    timeline: Timeline | None = None
    memory_cache: int | None = None
    recent_chunks: RecentChunks | None = None
    learned: LearnedStore | None = None
    missed: dict[bytes, ChunkSpec] | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def open(
        cls,
        store: Store,
        options: ModelOptions = _STORES_OWN,
        *,
        identity: StoreIdentity | None = None,
        decoder: Decoder | None = None,
        gradients: bool = False,
        checks_later: bool = False,
        warn: Warn = warn_nobody,
        finder: Finder | None = None,
        **members: Any,
    ) -> Session:
        """Open a session; its model is loaded at the first use, unless there is a `decoder`. `identity`: of a store
        that is being made. `members`: as of the class. Raises StoreNotFoundError: the store is empty."""
        identity = identity or store_identity(store)
        model = StoreModel(store, identity, options, warn, decoder, gradients, checks_later)
        state, finder = StoreState(identity, MeasuredLosses(store)), finder or Finder(store, warn)
        return cls(store=store, model=model, state=state, finder=finder, warn=warn, **members)

    def refresh(self) -> None:
        """Reload what other writers have changed. Raises ModelError: the store was made anew with another model;
        StoreFormatError: the store was replaced by another one."""
        state, revision = self.state, self.store.revision()
        if revision == state.revision:
            return
        identity = store_identity(self.store)
        if identity.fingerprint != state.identity.fingerprint:
            raise ModelError(f"the store at {self.store.path} is another model's now", "open it again")
        if identity != state.identity:
            state.identity, state.lead_ins = identity, None
            if self.learned is not None:
                self.learned.identity = identity
        state.losses = MeasuredLosses(self.store)
        if self.model.is_loaded and isinstance(self.source, ChunkCache):
            self.source.recheck()
        state.revision = revision

    @property
    def identity(self) -> StoreIdentity:
        return self.state.identity

    @property
    def losses(self) -> MeasuredLosses:
        return self.state.losses

    @property
    def parts(self) -> PromptParts:
        return PromptParts(self.identity.prefix, self.identity.answer_header)

    @property
    def decoder(self) -> Decoder:
        return self.model.decoder

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def layers(self) -> int:
        return self.model.layers

    @property
    def lead_ins(self) -> LeadIns:
        if self.state.lead_ins is None:
            self.state.lead_ins = lead_ins_of(self.identity, self.decoder)
        return self.state.lead_ins

    @cached_property
    def warn_once(self) -> Warn:
        return cache(self.warn)

    @cached_property
    def say_once(self) -> Callable[[str], None]:
        return cache(self.say)

    @cached_property
    def profiles(self) -> ProfileCache:
        return ProfileCache(self.store)

    @cached_property
    def source(self) -> KVSource:
        source = StoreSource(self.store, self.decoder, self.profiles)
        if self.memory_cache is None:
            return source
        return ChunkCache(source, self.memory_cache, self.store.record_mark, held_on(self.decoder))

    @cached_property
    def speeds(self) -> SpeedBook:
        from kvtool.core.session.speeds import SpeedBook

        return SpeedBook(self.store, self.decoder, self.identity.fingerprint, self.say)

    def holds(self, segment: Segment) -> bool:
        """Return whether a segment's KV is in memory."""
        if self.memory_cache is None:  # the source would load the model
            return False
        return isinstance(self.source, ChunkCache) and self.source.holds(segment, self.layers)

    def check_gate(self, chunk_ids: Sequence[bytes] = ()) -> bool:
        """Run the conformance checks at a model's first use of the store, and compare those of `chunk_ids` that another
        arithmetic has made with this one's own records. False: they could not be compared, so none of them can be read.
        Raises GateError, with the measured numbers."""
        state, arithmetic = self.state, self.model.arithmetic
        self.model.check_forward()
        if state.conformance is None:
            is_known = not self.model.is_loaded or self.decoder.loaded.fingerprint
            result = stored_result(self.store, self.identity.fingerprint, arithmetic) if is_known else None
            if result is None:
                from kvtool.core.session.gate import gate_store

                result = gate_store(self.store, self.decoder, self.identity)
            if result is None:
                return False
            state.conformance = result
        others = {str(maker) for maker in self.store.arithmetics(chunk_ids) if maker not in (None, arithmetic)}
        if not self.identity.keeps_states and not others <= state.conformance.cross_dtype_loss.keys():
            from kvtool.core.session.gate import cross_dtype_records

            measured = state.conformance
            state.conformance = cross_dtype_records(self.store, self.decoder, self.identity, measured, chunk_ids)
        state.conformance.enforce()
        return others <= state.conformance.cross_dtype_loss.keys()

    def check_prefix(self, segments: Sequence[Ids], prefix: StoredPrefix) -> None:
        """Compare a prompt's stored prefix of another arithmetic with this one's own, at its first use. `segments`:
        token ids of the prompt's segments, of which `prefix` has the checkpoints. Raises GateError."""
        state = self.state
        if state.conformance is not None:
            from kvtool.core.session.gate import cross_dtype_prefix

            state.conformance = cross_dtype_prefix(self.store, self.decoder, state.conformance, segments, prefix)
            state.conformance.enforce()

    def with_learning(self, budget: int, owners: Collection[str] | None = None) -> Session:
        """Return a session that also reads learned passages, from a store of at most `budget` bytes; those of `owners`
        (None: all) stay. Raises UsageError: the model keeps states; KvtoolError: there is no place for the store."""
        from kvtool.core.session.learned import LearnedStore

        self.identity.check_movable("--learn")
        learned = LearnedStore(self.store.uuid, self.identity, self.decoder, budget, self.warn_once)
        self.store.more = learned.store
        try:
            learned.trim(owners)
        except (KvtoolError, OSError) as error:  # questions can be answered, and the next passage makes room
            hint = f"start again, or stop the store's servers and remove {learned.store.path}"
            self.warn_once(f"the learned passages could not be trimmed: {error}", hint)
        return replace(self, learned=learned)

    def close(self) -> None:
        if self.learned is not None:
            self.learned.close()
        self.store.more = None
        self.store.close()
