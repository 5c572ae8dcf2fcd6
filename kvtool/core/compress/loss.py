"""Loss of a level in the model's answers: the same prompts from exact and from decoded records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import NAMES, Encoded, LayerKV, Payload, shape_of_layer
from kvtool.core.codec.encode import encode_levels, encode_rows, some_rows
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Ids
from kvtool.core.compress.by_layer import Toll, tolls
from kvtool.core.compress.rows import HeavyRows
from kvtool.core.errors import DamagedError
from kvtool.core.evaluate.measures import Row, means, score
from kvtool.core.evaluate.reference import Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import KVSource, ReadStats, RecordMissing
from kvtool.core.model.generate import Generated

if TYPE_CHECKING:
    from kvtool.core.session.session import Session

EXACT = "exact"
_MAX_TOKENS = 32  # of the longest answer that is compared


@dataclass(frozen=True, slots=True)
class Question:
    """A question's prompt, laid out, and the right answers where they are known."""

    plan: Plan
    answers: tuple[str, ...] = ()


class Scheme(Protocol):
    """Something that keys and values can be sent through."""

    def rows(self, segment: Segment) -> Ids | None:
        """Return the rows of a chunk that are decoded; None: all of them."""
        ...

    def round_trip(self, kvs: Sequence[LayerKV], rows: Ids | None) -> tuple[list[LayerKV], list[int]]:
        """Send all layers of one chunk; returns what comes back, and how many bytes each was, all included."""
        ...


@dataclass(frozen=True, slots=True)
class LevelScheme:
    """A lossy level, as a record of its own; `heavy` chooses the rows where some are left out."""

    level: str
    profile: Profile | None
    heavy: HeavyRows | None = None

    def rows(self, segment: Segment) -> Ids | None:
        """Return the rows of a chunk that the level stores; None: all of them."""
        if level_of(self.level).share == 100:
            return None
        assert self.heavy is not None
        return self.heavy.of(segment.source.chunk_id, segment.source.ids, self.level)

    def round_trip(self, kvs: Sequence[LayerKV], rows: Ids | None) -> tuple[list[LayerKV], list[int]]:
        """Encode and decode all layers of one chunk, or some rows of them; returns these and each record's bytes."""
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
class Held:
    """A prompt's cached KV in memory, by layer and by the position at which a segment starts.

    Filled before the model runs: work beside it, on its own cores, would take several times as long.
    """

    layers: list[dict[int, LayerKV]]

    @classmethod
    def exact(cls, source: KVSource, plan: Plan, layers: int) -> Held:
        """Read what a source gives. Raises DamagedError: a loss against a chunk computed anew would say nothing."""
        stats, starts = ReadStats(), [segment.position for segment in plan.cached]
        try:
            read = [source.read(plan.cached, layer, stats) for layer in range(layers)]
        except RecordMissing as missing:
            chunk = missing.segment.source.chunk_id.hex()[:12]
            raise DamagedError(f"the exact record of chunk {chunk} cannot be read: {missing.reason}", REPAIR) from None
        return cls([dict(zip(starts, kv, strict=True)) for kv in read])

    def through(self, scheme: Scheme, plan: Plan, prefix_id: bytes) -> tuple[Held, Plan, list[Toll]]:
        """Send it through a scheme: what comes back, the plan of that, and each layer's toll. The prompt's beginning is
        left as it is."""
        lossy, segments = Held([dict(kv) for kv in self.layers]), list(plan.segments)
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
                segments[number] = replace(segment, status="hit", source=replace(segment.source, kept=rows))
        return lossy, Plan(tuple(segments)), totals

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        """Read as a KVSource does."""
        return [self.layers[layer][segment.position] for segment in segments]


def measure(
    session: Session,
    questions: Iterable[Question],
    schemes: Mapping[str, Scheme],
    advance: Callable[[int], None] = lambda questions: None,
) -> dict[str, list[Row]]:
    """Measure what each scheme loses, one row a question: see `measure_one`."""
    rows: dict[str, list[Row]] = {name: [] for name in (EXACT, *schemes)}
    for question in questions:
        for name, row in measure_one(session, question, schemes).items():
            rows[name].append(row)
        advance(1)
    return rows


def measure_one(session: Session, question: Question, schemes: Mapping[str, Scheme]) -> dict[str, Row]:
    """Measure what each scheme loses of one question with nothing recomputed (`reuse`): its own effect, undiluted.

    Returns
    -------
    For each scheme: KL in nats of the first token and over the exact run's own greedy answer (teacher-forced, end token
    included), the share of its tokens that stay the most likely ones, the tolls of the layers; and for each and for
    `exact` F1 where answers are known.

    Raises
    ------
    DamagedError : an exact record of the prompt cannot be read.
    """
    decoder, prefix_id = session.decoder, session.identity.prefix_id
    plan = question.plan

    def fused(source: KVSource, plan: Plan) -> Fused:
        return fuse(decoder, plan, Reuse(), source, reserve=_MAX_TOKENS)

    held = Held.exact(session.source, plan, decoder.stored_layers)
    reference = Reference.answered(decoder, fused(held, plan), _MAX_TOKENS)
    rows = {EXACT: _scored(lambda: reference.answer, question)}
    for name, scheme in schemes.items():
        lossy, of_rows, tolls = held.through(scheme, plan, prefix_id)
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
    """Average a scheme's rows, and tell over how many questions."""
    return means(rows) | {"questions": len(rows)}


def tolls_of(rows: Sequence[Row]) -> list[Toll]:
    """Add up what a scheme took and spoiled in all questions, one toll a layer."""
    by_layer = zip(*(row["tolls"] for row in rows), strict=True)
    return [sum((Toll(**toll) for toll in layer), Toll()) for layer in by_layer]


def _scored(answer: Callable[[], Generated], question: Question) -> Row:
    """Score an answer, which is only given where right ones are known."""
    return {"f1": score(answer().text.strip(), question.answers).f1} if question.answers else {}
