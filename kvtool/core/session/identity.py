"""The identity of a store: model, the prompt's fixed parts, lead-in and splitting; with what was measured of it.

`compress` measures the losses of codec profiles, and the gate (`session/gate.py`, which needs torch) a model's error in
the laws of `kvtool help design`, one file for each model and arithmetic. A model answers from fused caches only if it
conforms to these.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import HERE, Origin, chunk_id, ids_digest
from kvtool.core.checkpoint.files import ModelFiles, Once, unnoticed
from kvtool.core.checkpoint.hub import model_fingerprint, resolve
from kvtool.core.checkpoint.support import ONLY_EXACTLY
from kvtool.core.codec.levels import NO_PROFILE, exact, known, level_of, lossy, whole
from kvtool.core.common.machine import DEVICE_KINDS, NUMBER_FORMATS, Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import DamagedError, GateError, ModelError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.fusion.selectors import EXACTLY
from kvtool.core.model.options import DEFAULT_MODEL, ModelOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.codec.profile import Profile
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.records.encode import LeadIns


NEIGHBOUR = "neighbour"


@dataclass(frozen=True, slots=True)
class LeadInIds:
    """Token ids that every chunk is prefilled after; `neighbour` adds the document's previous chunk. `mode`: `warm`,
    `prefix`, `neighbour`, `bos`, `sink:N`, `none` or the name of a file."""

    mode: str
    ids: Ids

    def digest(self, before: Ids = ()) -> bytes:
        """Digest of the ids that a chunk is prefilled after; `before` is its own part of them."""
        return ids_digest([*self.ids, *before])


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The settings in a store's manifest, from which, with its token ids, a chunk's id follows. `fingerprint`: of
    weights, configuration, tokenizer and `dtype`. `dtype`: of stored KV; each machine chooses what it computes in.
    `prefix`: token ids before the first chunk. `answer_header`: token ids after the question. `system`: the instruction
    that both were made from. `keeps_states`: a recurrent model, of which only a prompt's prefix can be reused."""

    model: str
    fingerprint: str
    dtype: str
    prefix: Ids
    answer_header: Ids
    lead_in: LeadInIds
    split: SplitSettings
    system: str = ""
    namespace: str = ""
    keeps_states: bool = False

    def chunk_id(self, ids: Ids, before: Ids = ()) -> bytes:
        return self._id(ids, self.lead_in.digest(before))

    def wanted(self, ids: Ids, before: Ids = ()) -> ChunkSpec:
        return ChunkSpec(self.chunk_id(ids, before), ids, before, self.lead_in.digest(before))

    def spec_of(self, chunk_id: bytes, ids: Ids) -> ChunkSpec | None:
        """Return the chunk of this id and these tokens; None: it needs the chunk before it, or is not the store's."""
        if chunk_id == self.prefix_id:
            return self.wanted_prefix
        spec = self.wanted(ids)
        return spec if self.lead_in.mode != NEIGHBOUR and spec.chunk_id == chunk_id else None

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a chunk: the end of a sentence may exceed the size it was split by."""
        return 2 * self.split.max_tokens + 64

    def check_modes(self, modes: Iterable[str], deferred: bool) -> None:
        """Refuse fusion modes, and deferred loading, that a recurrent model does not have. Raises UsageError."""
        if not self.keeps_states:
            return
        for mode in modes:
            if mode not in EXACTLY:
                self.check_movable(f"--fusion {mode}")
        if deferred:
            raise UsageError(
                "--defer adds chunks to a prompt, and the state after them is another one", "leave --defer out"
            )

    def check_movable(self, feature: str) -> None:
        if self.keeps_states:
            needed = "that would need a state that is the same at every position of its chunk"
            raise UsageError(
                f"{feature} needs chunks that can be moved, and {self.model} keeps a recurrent state; {needed}",
                f"{ONLY_EXACTLY}, which take no such chunks",
            )

    @property
    def wanted_prefix(self) -> ChunkSpec:
        return ChunkSpec(self.prefix_id, self.prefix, (), ids_digest([]))

    @property
    def prefix_id(self) -> bytes:
        return self._id(self.prefix, ids_digest([]))

    def _id(self, ids: Ids, lead_in: bytes) -> bytes:
        return chunk_id(namespace=self.namespace, model_fingerprint=self.fingerprint, lead_in=lead_in, token_ids=ids)

    def settings_digest(self) -> str:
        """Digest of all settings that decide a file's chunks; a file's entry has it."""
        text = json.dumps([self.fingerprint, self.namespace, asdict(self.split), asdict(self.lead_in)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_manifest(self) -> dict[str, Any]:
        return {"identity": asdict(self)}

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> StoreIdentity | None:
        if "identity" not in manifest:
            return None
        try:
            row = dict(manifest["identity"])
            lead_in = LeadInIds(row["lead_in"]["mode"], tuple(row["lead_in"]["ids"]))
            split = SplitSettings(**row["split"])
            ids = {name: tuple(row[name]) for name in ("prefix", "answer_header")}
            return cls(**(row | ids | {"lead_in": lead_in, "split": split}))
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFormatError(
                f"the store's manifest cannot be read: {error!r}", "ingest into a new store"
            ) from error


def store_identity(store: Store) -> StoreIdentity:
    """Read a store's identity. Raises StoreNotFoundError if nothing was ever ingested into it."""
    identity = StoreIdentity.from_manifest(store.manifest())
    if identity is None:
        raise StoreNotFoundError(f"the store at {store.path} is empty", "run `kvtool ingest PATH` first")
    return identity


def lead_ins_of(identity: StoreIdentity, decoder: Decoder) -> LeadIns:
    from kvtool.core.model.prefill import LeadIn
    from kvtool.core.records.encode import LeadIns

    other = other_lead_in_ids(identity, decoder.loaded.tokenizer)
    return LeadIns(LeadIn(decoder, identity.lead_in.ids), LeadIn(decoder, other))


def other_lead_in_ids(identity: StoreIdentity, tokenizer: Any) -> Ids:
    """Choose the lead-in for comparison: how far does a text before a chunk move its values? For a store whose chunks
    follow their own text (`warm`, a file) that is the plain prefix; else the warm one."""
    from kvtool.core.model.prompt import PromptParts, lead_in_ids

    lead_in, parts = identity.lead_in, PromptParts(identity.prefix, identity.answer_header)
    plain, warm = (lead_in_ids(mode, tokenizer, parts) for mode in ("prefix", "warm"))
    return plain if lead_in.mode != NEIGHBOUR and len(lead_in.ids) > len(plain) else warm


def model_files(identity: StoreIdentity, options: ModelOptions, made_by: Origin = HERE) -> ModelFiles:
    """Find the files of a store's model, by default where they were. `made_by`: origin of the model's name in the
    manifest. Raises ModelError: they cannot be found, or are another model's."""
    files = resolve_named(options.model, identity.model, made_by, options.offline)
    check_same_model(files, identity)
    return files


def resolve_named(name: str | None, stored: str, made_by: Origin, offline: bool, once: Once = unnoticed) -> ModelFiles:
    """Find the model that the user names, else the one that the store names. Raises ModelError, also if the model that
    another person's store names is not on this machine: it is not downloaded unless the user names it, too."""
    if name or stored == DEFAULT_MODEL or not made_by.is_foreign:
        return resolve(name or stored, offline=offline, once=once)
    try:
        return resolve(stored, offline=True, once=once)
    except ModelError as error:
        problem = f"the model {stored}, which {made_by.name} names, is not on this machine"
        raise ModelError(problem, f"if you want it, say so: --model {shlex.quote(stored)}") from error


def is_same_model(files: ModelFiles, identity: StoreIdentity) -> bool:
    return model_fingerprint(files, identity.dtype) == identity.fingerprint


def check_same_model(files: ModelFiles, identity: StoreIdentity) -> None:
    """Raises ModelError if weights, configuration or tokenizer differ from those of the store's model."""
    if not is_same_model(files, identity):
        raise ModelError(
            f"the store was built with another model than {files.ref} (it was {identity.model})",
            "use that model, or another --store for this one",
        )


# ---- losses of codec profiles, as `compress` measures them --------------------------------------------------------


class MeasuredLosses:
    """Measured losses of the lossy levels, by codec profile: KL of the answer in nats a token, as of `compress`. An
    unreadable state counts as not measured. A level without profiles has one loss."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, dict[str, float]] = {}
        self._alone: dict[str, float] = {}
        self._maker = NO_PROFILE.hex()
        with suppress(DamagedError, AttributeError, KeyError, TypeError, ValueError):
            state = store.codec_state()
            self._maker = state.get("profile") or self._maker
            measured = {
                maker: {level: float(rows[level]["kl_answer"]) for level in lossy(rows)}
                for maker, rows in (state.get("losses") or {}).items()
            }
            for rows in measured.values():
                self._alone |= {level: loss for level, loss in rows.items() if not level_of(level).profiled}
            self._rows = measured

    def of(self, chunk_id: bytes, levels: Iterable[str]) -> dict[str, float]:
        measured = {level for rows in self._rows.values() for level in rows}.union(self._alone)
        losses = {level: self._loss(chunk_id, level) for level in measured.intersection(levels)}
        return {level: loss for level, loss in losses.items() if loss is not None}

    def _loss(self, chunk_id: bytes, level: str) -> float | None:
        if not level_of(level).profiled:
            return self._alone[level]
        return self._rows.get(self._store.made_with(chunk_id, level) or "", {}).get(level)

    def of_new(self, level: str) -> float | None:
        """Loss of records with the store's current profile; None if not measured."""
        return self._alone.get(level, self._rows.get(self._maker, {}).get(level))

    def at_most(self) -> dict[str, float]:
        """Map to each level the largest loss of any stored chunk, if the losses of all its chunks are known."""
        lost: dict[str, float] = {}
        for chunk in self._store.chunk_ids() if self._rows or self._alone else ():
            stored = lossy(self._store.levels(chunk))
            level_losses = self.of(chunk, stored)
            for level in stored:
                lost[level] = max(lost.get(level, 0.0), level_losses.get(level, math.inf))
        return {level: lost[level] for level in lossy(lost) if lost[level] < math.inf}


def allowed_levels(levels: Sequence[str], losses: Mapping[str, float], max_loss: float) -> list[str]:
    """Choose the levels of a chunk that lose nothing, or at most `max_loss`; the finest first."""
    return [level for level in known(levels) if level_of(level).lossless or losses.get(level, math.inf) <= max_loss]


def smallest_allowed(levels: Sequence[str], losses: Mapping[str, float], max_loss: float) -> str | None:
    """Choose the smallest level of a chunk whose loss is allowed; without one, the level that loses least."""
    exactly = min((level_of(level).bits for level in exact(levels)), default=math.inf)
    allowed = [level for level in lossy(allowed_levels(levels, losses, max_loss)) if level_of(level).bits < exactly]
    return next(iter((*reversed(allowed), *reversed(exact(levels)), *_least_lossy(levels, losses))), None)


def _least_lossy(levels: Sequence[str], losses: Mapping[str, float]) -> list[str]:
    """Order the finest lossy level that stores all rows, and the levels that drop rows, by their losses."""
    finest = lossy(whole(levels))[:1]
    sparse = [level for level in lossy(levels) if level_of(level).share < 100]
    unknown = dict.fromkeys(finest, 0.0)
    return sorted([*finest, *sparse], key=lambda level: losses.get(level, unknown.get(level, math.inf)))


class ProfileCache:
    """A cache of a store's codec profiles by digest; each is read and checked once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[bytes, Profile] = {}

    def __call__(self, digest: bytes) -> Profile:
        from kvtool.core.codec.profile import Profile, digest_of

        profile = self._read.get(digest)
        if profile is None:
            data = self._store.profile(digest)
            if data is None or digest_of(data) != digest:
                raise DamagedError(
                    f"the codec profile {digest.hex()} is not in the store", "make it anew with `kvtool compress --fit`"
                )
            profile = self._read[digest] = Profile.from_bytes(data)
        return profile

    def current(self) -> Profile | None:
        """Profile of new records; None before the first `compress`. Raises DamagedError if it is lost."""
        digest = self._store.codec_state().get("profile", "")
        return self(bytes.fromhex(digest)) if digest else None


# ---- conformance of a model, as the gate measures it -------------------------------------------------------------

GATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """A law of `kvtool help design` and a model's error: RMS difference over the reference's standard deviation."""

    law: int
    name: str
    difference: float
    tolerance: float
    arithmetic: str  # such as "bfloat16 on cpu"

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class ConformanceResult:
    """The checks of a model, stored by its fingerprint and its arithmetic. `cross_dtype_loss`: nats a token that
    records of another arithmetic ("float32 on cpu") lose against this one's own."""

    fingerprint: str
    checks: tuple[ConformanceCheck, ...]
    cross_dtype_loss: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        row = {"format": GATE_FORMAT, "fingerprint": self.fingerprint, "passed": self.passed, "checks": checks}
        return row | ({"loss_by_arithmetic": self.cross_dtype_loss} if self.cross_dtype_loss else {})

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> ConformanceResult:
        keys = ("law", "name", "difference", "tolerance", "arithmetic")
        checks = tuple(ConformanceCheck(**{key: check[key] for key in keys}) for check in row["checks"])
        cross_dtype_loss = {str(name): float(loss) for name, loss in row.get("loss_by_arithmetic", {}).items()}
        return cls(row["fingerprint"], checks, cross_dtype_loss)

    def enforce(self) -> None:
        failed = [check for check in self.checks if not check.passed]
        if failed:
            numbers = "; ".join(f"law {c.law} ({c.name}): {c.difference:.3g} > {c.tolerance:.3g}" for c in failed)
            raise GateError(
                f"the gate refuses this model: {numbers}",
                "use --fusion full, or --force to answer from caches that are known to be wrong",
            )


def stored_result(store: Store, model: str, arithmetic: Arithmetic) -> ConformanceResult | None:
    """Read the result of a model that computes in `arithmetic`; None before its first use of the store."""
    try:
        return ConformanceResult.from_json(store.read_side(_file(model, arithmetic), format=GATE_FORMAT))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or unreadable: the checks are run again


def known_result(store: Store, model: str) -> ConformanceResult | None:
    """Merge the stored results of a model in all arithmetics; None before the first."""
    every = (stored_result(store, model, Arithmetic(*names)) for names in product(NUMBER_FORMATS, DEVICE_KINDS))
    results, worst = [result for result in every if result is not None], dict[str, float]()
    for arithmetic, loss in (item for result in results for item in result.cross_dtype_loss.items()):
        worst[arithmetic] = max(worst.get(arithmetic, 0.0), loss)
    checks = tuple(check for result in results for check in result.checks)
    return ConformanceResult(model, checks, dict(sorted(worst.items()))) if results else None


def keep_result(store: Store, result: ConformanceResult, arithmetic: Arithmetic) -> None:
    store.write_side(_file(result.fingerprint, arithmetic), result.to_json())


def _file(model: str, arithmetic: Arithmetic) -> str:
    return f"gate/{model}-in-{arithmetic.dtype}-on-{arithmetic.device}.json"
