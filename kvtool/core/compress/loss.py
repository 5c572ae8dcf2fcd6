"""What a level costs in the model's answers: the same prompts from exact and from decoded records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV
from kvtool.core.codec.encode import encode_levels
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.raw import NAMES
from kvtool.core.compress.by_layer import Toll
from kvtool.core.errors import DamagedError
from kvtool.core.evaluate.reference import Distance, Reference
from kvtool.core.evaluate.scoring import score
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import KVSource, ReadStats, RecordMissing
from kvtool.core.model.decoder import Decoder

EXACT = "exact"
_MAX_TOKENS = 32  # of the longest answer that is compared


@dataclass(frozen=True, slots=True)
class Question:
    """A question's prompt, laid out, and the right answers where they are known."""

    plan: Plan
    answers: tuple[str, ...] = ()


class Scheme(Protocol):
    """Something that keys and values can be sent through."""

    def round_trip(self, kv: LayerKV, layer: int) -> tuple[LayerKV, int]:
        """One layer of one chunk as it comes back, and how many bytes it was, all included."""
        ...


@dataclass(frozen=True, slots=True)
class LevelScheme:
    """A lossy level, as a record of its own."""

    level: str
    profile: Profile | None
    predictor: str = "auto"
    layers: int = 1

    def round_trip(self, kv: LayerKV, layer: int) -> tuple[LayerKV, int]:
        keys, values = kv
        made = encode_levels(
            keys, values, layer, [self.level], self.profile, predictor=self.predictor, layers=self.layers
        )
        payload = b"".join(made[self.level])
        kv_heads, tokens, head_dim = keys.shape
        item = Encoded(payload, (kv_heads, tokens, head_dim), NAMES[keys.dtype])
        return CODECS[self.level].decode([item], layer, self._profiles)[0], len(payload) + OVERHEAD_BYTES

    def _profiles(self, digest: bytes) -> Profile:
        assert self.profile is not None
        return self.profile


@dataclass(slots=True)
class Held:
    """A prompt's cached KV in memory, by layer and by where a segment starts.

    Filled before the model runs: work beside it, on its own cores, would take several times as long.
    """

    layers: list[dict[int, LayerKV]]

    @classmethod
    def exact(cls, source: KVSource, plan: Plan, layers: int) -> Held:
        """What a source gives; raises DamagedError: a loss against a chunk computed anew would say nothing of it."""
        stats, starts = ReadStats(), [segment.start for segment in plan.cached]
        try:
            read = [source.read(plan.cached, layer, stats) for layer in range(layers)]
        except RecordMissing as missing:
            chunk = missing.segment.source.chunk_id.hex()[:12]
            raise DamagedError(f"the exact record of chunk {chunk} cannot be read: {missing.reason}", REPAIR) from None
        return cls([dict(zip(starts, found, strict=True)) for found in read])

    def through(self, scheme: Scheme, plan: Plan, prefix_id: bytes) -> tuple[Held, list[Toll]]:
        """The same sent through a scheme, and each layer's toll; the prompt's beginning is never compressed."""
        kept = {segment.start for segment in plan.cached if segment.source.chunk_id == prefix_id}
        sent = Held([dict(found) for found in self.layers])
        tolls = [Toll() for _ in self.layers]
        for layer, found in enumerate(sent.layers):
            for start in found.keys() - kept:
                exact = found[start]
                found[start], size = scheme.round_trip(exact, layer)
                tolls[layer] += Toll.of(exact, found[start], size)
        return sent, tolls

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        """See KVSource."""
        return [self.layers[layer][segment.start] for segment in segments]


@dataclass(slots=True)
class Loss:
    """What was measured of one level, a number a question; and its toll of every layer, over the chunks of all."""

    kl_first: list[float] = field(default_factory=list)
    kl_answer: list[float] = field(default_factory=list)
    top1_agrees: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    layers: list[Toll] = field(default_factory=list)

    def to_json(self) -> dict[str, float]:
        """Means, and how many questions they are over."""
        lists = {name: getattr(self, name) for name in ("kl_first", "kl_answer", "top1_agrees", "f1")}
        row = {name: statistics.fmean(values) for name, values in lists.items() if values}
        return row | {"questions": len(self.kl_first)}

    @property
    def bits(self) -> float:
        """Bits of a number of K or V, over the chunks of all prompts."""
        return sum(self.layers, Toll()).bits

    def add(self, distance: Distance, tolls: Sequence[Toll]) -> None:
        """Count one prompt: how far its answer moved, and what was lost at each layer."""
        self.kl_first.append(distance.kl_first)
        self.kl_answer.append(distance.kl_answer)
        self.top1_agrees.append(distance.agreement)
        before = self.layers or [Toll() for _ in tolls]
        self.layers = [a + b for a, b in zip(before, tolls, strict=True)]

    def add_answer(self, text: str, answers: Sequence[str]) -> None:
        """Score one prompt's answer where the right ones are known."""
        if answers:
            self.f1.append(score(text.strip(), answers).f1)


def measure(
    decoder: Decoder,
    exact: KVSource,
    questions: Iterable[Question],
    schemes: Mapping[str, Scheme],
    prefix_id: bytes,
    advance: Callable[[int], None] = lambda questions: None,
) -> dict[str, Loss]:
    """Loss of each scheme with nothing recomputed (`reuse`): the codec's own effect, undiluted.

    Parameters
    ----------
    exact : gives the chunks' exact KV. What of it is damaged is raised as DamagedError.

    Returns
    -------
    For each scheme, and for `exact`: KL in nats of the first token and over the exact run's own greedy answer (teacher-
    forced, end token included), the share of its tokens that stay the most likely ones, and F1 where answers are known.
    """
    losses = {name: Loss() for name in (EXACT, *schemes)}

    def fused(plan: Plan, held: Held) -> Fused:
        return fuse(decoder, plan, Reuse(), held, reserve=_MAX_TOKENS)

    for question in questions:
        plan, answers = question.plan, question.answers
        held = Held.exact(exact, plan, len(decoder.layers))
        reference = Reference.answered(decoder, fused(plan, held), _MAX_TOKENS)
        losses[EXACT].add_answer(reference.answer.text, answers)
        for name, scheme in schemes.items():
            lossy, tolls = held.through(scheme, plan, prefix_id)
            forced = reference.force(fused(plan, lossy))
            losses[name].add(forced.distance, tolls)
            if answers:
                losses[name].add_answer(forced.answer(_MAX_TOKENS).text, answers)
        advance(1)
    return losses
