"""Loss of a level in the model's answers: the same prompts from exact and from decoded records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvtool.core.cache.identity import ids_digest
from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import NAMES, Encoded, LayerKV, Payload, shape_of_layer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import SIDES, Profile
from kvtool.core.codec.transform import encode_levels, encode_rows, some_rows
from kvtool.core.codec.transform_kernels import squares_of
from kvtool.core.common.types import Ids
from kvtool.core.compress.fitting import probes
from kvtool.core.errors import DamagedError
from kvtool.core.evaluate.measures import Row, means, score
from kvtool.core.evaluate.reference import Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Candidate, Plan, Segment, build_plan
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.fusion.source import KVSource, ReadStats, RecordMissing
from kvtool.core.model.generate import Generated
from kvtool.core.records.encode import heaviest, repeated
from kvtool.core.records.read import exact_level
from kvtool.core.session.session import Session

if TYPE_CHECKING:
    import torch

EXACT = "exact"
MODE = Union()  # the default one, in which losses are measured
_MAX_TOKENS = 32  # of the longest answer that is compared
_TOGETHER = 4  # chunks whose rows are weighed in one pass


@dataclass(frozen=True, slots=True)
class Question:
    plan: Plan
    answers: tuple[str, ...] = ()


class Scheme(Protocol):
    def rows(self, segment: Segment) -> Ids | None:
        """Return the rows of a chunk that are decoded; None: all of them."""
        ...

    def round_trip(self, kvs: Sequence[LayerKV], rows: Ids | None) -> tuple[list[LayerKV], list[int]]:
        """Send all layers of one chunk; returns what comes back, and how many bytes each was, all included."""
        ...


@dataclass(frozen=True, slots=True)
class LevelScheme:
    level: str
    profile: Profile | None
    heavy: HeavyRows

    def rows(self, segment: Segment) -> Ids | None:
        if level_of(self.level).share == 100:
            return None
        return self.heavy.of(segment.source.chunk_id, segment.source.ids, self.level)

    def round_trip(self, kvs: Sequence[LayerKV], rows: Ids | None) -> tuple[list[LayerKV], list[int]]:
        records = [bytearray().join(payload) for payload in self._encoded(kvs, rows)]
        items = [
            Encoded(record, shape_of_layer(kv), NAMES[kv[0].dtype]) for record, kv in zip(records, kvs, strict=True)
        ]
        back = CODECS[self.level].decode_layers(items, self._profiles)
        return back, [len(record) + OVERHEAD_BYTES for record in records]

    def _encoded(self, kvs: Sequence[LayerKV], rows: Ids | None) -> list[Sequence[Payload]]:
        if rows is None:
            return encode_levels(kvs, [self.level], self.profile)[self.level]
        return encode_rows(kvs, rows, self.level, self.profile)

    def _profiles(self, digest: bytes) -> Profile:
        assert self.profile is not None
        return self.profile


@dataclass(slots=True)
class PromptKV(KVSource):
    """A prompt's cached KV in memory, by layer and segment start; filled before the model needs the cores."""

    layers: list[dict[int, LayerKV]]

    @classmethod
    def exact(cls, source: KVSource, plan: Plan, layers: int) -> PromptKV:
        """Raises DamagedError: a loss against a chunk computed anew would say nothing."""
        stats, starts = ReadStats(), [segment.position for segment in plan.cached]
        try:
            read = [source.read(plan.cached, layer, stats) for layer in range(layers)]
        except RecordMissing as missing:
            chunk = missing.segment.source.chunk_id.hex()[:12]
            raise DamagedError(f"the exact record of chunk {chunk} cannot be read: {missing.reason}", REPAIR) from None
        return cls([dict(zip(starts, kv, strict=True)) for kv in read])

    def round_trip(self, scheme: Scheme, plan: Plan, prefix_id: bytes) -> tuple[PromptKV, Plan, list[Toll]]:
        """Send the KV, without the prompt's beginning, through a scheme; also its plan and each layer's toll."""
        lossy, segments = PromptKV([dict(kv) for kv in self.layers]), list(plan.segments)
        totals = [Toll() for _ in self.layers]
        for number, segment in enumerate(plan.segments):
            if not segment.cached or segment.source.chunk_id == prefix_id:
                continue
            rows = scheme.rows(segment)
            exact = [kv[segment.position] for kv in self.layers]
            back, sizes = scheme.round_trip(exact, rows)
            right = exact if rows is None else some_rows(exact, rows)
            made = tolls(right, back, sizes, len(segment.source.ids))
            totals = [total + toll for total, toll in zip(totals, made, strict=True)]
            for kv, own in zip(lossy.layers, back, strict=True):
                kv[segment.position] = own
            if rows is not None:
                segments[number] = replace(segment, status="hit", source=replace(segment.source, stored_rows=rows))
        return lossy, Plan(tuple(segments)), totals

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        return [self.layers[layer][segment.position] for segment in segments]


def measure(session: Session, question: Question, schemes: Mapping[str, Scheme]) -> dict[str, Row]:
    """Measure what each scheme loses of one question in the default mode, against the same mode over exact records."""
    decoder, prefix_id = session.decoder, session.identity.prefix_id
    plan = question.plan

    def fused(source: KVSource, plan: Plan) -> Fused:
        return fuse(decoder, plan, MODE, source, reserve=_MAX_TOKENS)

    cached = PromptKV.exact(session.source, plan, decoder.stored_layers)
    reference = Reference.answered(decoder, fused(cached, plan), _MAX_TOKENS)
    rows = {EXACT: _scored(lambda: reference.answer, question)}
    for name, scheme in schemes.items():
        lossy, of_rows, tolls = cached.round_trip(scheme, plan, prefix_id)
        forced = reference.force(fused(lossy, of_rows))
        distance = forced.distance
        rows[name] = {
            "kl_first": distance.kl_first,
            "kl_answer": distance.kl_answer,
            "top1_agrees": distance.agreement,
            **_scored(partial(forced.answer, _MAX_TOKENS), question),
            "tolls": [asdict(toll) for toll in tolls],
        }
    return rows


def mean_loss(rows: Sequence[Row]) -> dict[str, float]:
    return means(rows) | {"questions": len(rows)}


def tolls_of(rows: Sequence[Row]) -> list[Toll]:
    by_layer = zip(*(row["tolls"] for row in rows), strict=True)
    return [sum((Toll(**toll) for toll in layer), Toll()) for layer in by_layer]


def _scored(answer: Callable[[], Generated], question: Question) -> Row:
    return {"f1": score(answer().text.strip(), question.answers)["f1"]} if question.answers else {}


@dataclass(slots=True)
class Toll:
    """Size and error of a scheme at one layer: sums of squares over chunks; `elements` include dropped rows."""

    bytes: int = 0
    elements: int = 0
    wrong: tuple[float, float] = (0.0, 0.0)
    size: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: Toll) -> Toll:
        return Toll(
            self.bytes + other.bytes,
            self.elements + other.elements,
            (self.wrong[0] + other.wrong[0], self.wrong[1] + other.wrong[1]),
            (self.size[0] + other.size[0], self.size[1] + other.size[1]),
        )

    @property
    def bits(self) -> float:
        return 8 * self.bytes / self.elements if self.elements else 0.0

    def to_json(self) -> dict[str, Any]:
        errors = [(wrong / size) ** 0.5 if size else 0.0 for wrong, size in zip(self.wrong, self.size, strict=True)]
        return {"bits_per_element": self.bits, "k_relative_error": errors[0], "v_relative_error": errors[1]}


def tolls(exact: Sequence[LayerKV], lossy: Sequence[LayerKV], sizes: Sequence[int], tokens: int) -> list[Toll]:
    """Measure the layers of one chunk of so many tokens, of which these rows are stored in so many bytes."""
    right, wrong = ([side for kv in kvs for side in kv] for kvs in (exact, lossy))
    sums = squares_of(wrong, right).reshape(-1, SIDES, 2).tolist()
    return [
        Toll(size, sum(tokens * side[:, 0].numel() for side in kv), (keys[0], values[0]), (keys[1], values[1]))
        for kv, size, (keys, values) in zip(exact, sizes, sums, strict=True)
    ]


class HeavyRows:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._worth: dict[bytes, torch.Tensor] = {}

    def learn(self, chunks: Sequence[tuple[bytes, Ids]]) -> None:
        left = [(chunk, ids) for chunk, ids in dict(chunks).items() if chunk not in self._worth]
        for first in range(0, len(left), _TOGETHER):
            some = left[first : first + _TOGETHER]
            made = repeated(self._session.decoder, self._session.lead_ins.own, [ids for _, ids in some])
            self._worth.update(zip((chunk for chunk, _ in some), made, strict=True))

    def of(self, chunk: bytes, ids: Ids, level: str) -> Ids:
        self.learn([(chunk, ids)])
        return heaviest(self._worth[chunk], level_of(level).share)


def own_prompts(session: Session, chunks: Sequence[tuple[bytes, str]], count: int) -> list[Question]:
    """Make prompts over chunks that are stored exactly, other ones than those that a profile is fitted with."""
    store, identity = session.store, session.identity
    described = [(chunk, level, info) for chunk, level in chunks if (info := store.chunk_info(chunk)) is not None]
    level = exact_level(store, identity.prefix_id) if identity.prefix else None
    prefix = Candidate(identity.prefix, identity.prefix_id, ids_digest([]), level)
    made = probes([info.token_ids for _, _, info in described], session.parts, session.tokenizer, count, seed=1)
    prompts = []
    for probe in made:
        own = [described[number] for number in probe.chunks]
        candidates = [
            Candidate(info.token_ids, chunk, info.lead_in, level, sensitivity=info.sensitivity)
            for chunk, level, info in own
        ]
        prompts.append(Question(build_plan(prefix, candidates, probe.question)))
    return prompts
