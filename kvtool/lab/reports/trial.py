"""One question: answered once in full, then by each run, with the run's distance to the full answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.common.types import Ids
from kvtool.core.evaluate.scoring import score
from kvtool.core.fusion.engine import Fused, forced_logits, fuse
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Sampling, first_token, generate
from kvtool.core.query.layout import Asked
from kvtool.core.query.reply import QueryOptions
from kvtool.core.session.session import selector_for
from kvtool.lab.reports.runs import REFERENCE, RunSpec

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer token ids without the end token; `end`: None if the answer was cut off at its longest."""

    ids: Ids
    end: int | None

    @property
    def script(self) -> list[int]:
        """The ids and the end token."""
        return [*self.ids, *([] if self.end is None else [self.end])]


@dataclass(frozen=True, slots=True)
class Reference:
    """The full answer, and the distributions before each token of its script.

    Attributes
    ----------
    log_p : float64 `[len(script), vocabulary]`.
    best : int64 `[len(script)]`, the most probable token of each.
    """

    answer: Answer
    log_p: torch.Tensor
    best: torch.Tensor
    ttft_ms: float

    def distance(self, logits: torch.Tensor) -> Row:
        """Of a run with these `logits` (float32, as `log_p`): KL in nats, first token and mean over the script."""
        log_q = logits.double().log_softmax(-1)
        divergence = (self.log_p.exp() * (self.log_p - log_q)).sum(-1)
        return {
            "kl_first": float(divergence[0]),
            "kl_answer": float(divergence.mean()),
            "top1_agrees": bool(self.best[0] == logits[0].argmax()),
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """One question, its prompt laid out.

    Attributes
    ----------
    source : where the records are read.
    options : their `max_tokens` bounds every answer; answers are greedy.
    """

    decoder: Decoder
    source: KVSource
    asked: Asked
    options: QueryOptions

    def rows(self, specs: Sequence[RunSpec]) -> Iterator[tuple[str, Row]]:
        """The reference's row under its name, then each run's; one cache is held at a time."""
        reference, row = self._reference()
        yield REFERENCE, row
        for spec in specs:
            yield spec.name, self._row(spec, reference)

    def _reference(self) -> tuple[Reference, Row]:
        fused, ttft = self._fuse(RunSpec(REFERENCE))
        sampling = Sampling(self.options.max_tokens)
        said = generate(self.decoder, fused.plan.ids, fused.cache, first_token(fused.logits, sampling), sampling)
        answer = Answer(said.ids, said.end)
        logits = forced_logits(self.decoder, fused, answer.script)
        reference = Reference(answer, logits.double().log_softmax(-1), logits.argmax(-1), ttft)
        distance = {"kl_first": 0.0, "kl_answer": 0.0, "top1_agrees": True}
        return reference, self._facts(fused, ttft, answer, reference) | distance

    def _row(self, spec: RunSpec, reference: Reference) -> Row:
        fused, ttft = self._fuse(spec)
        logits = forced_logits(self.decoder, fused, reference.answer.script)
        answer = continued(self.decoder, fused, reference.answer, logits, self.options.max_tokens)
        return self._facts(fused, ttft, answer, reference) | reference.distance(logits)

    def _fuse(self, spec: RunSpec) -> tuple[Fused, float]:
        """The run's cache, and its TTFT in ms: from the question's text to the first token's id."""
        selector = selector_for(spec.options(self.options), spec.mode)
        started = time.perf_counter()
        fused = fuse(self.decoder, self.asked.plan, selector, self.source, reserve=self.options.max_tokens)
        fused.logits.argmax().item()
        return fused, self.asked.retrieve_ms + (time.perf_counter() - started) * 1e3

    def _facts(self, fused: Fused, ttft: float, answer: Answer, reference: Reference) -> Row:
        text = answer_text(self.decoder, answer)
        counts = fused.tokens
        row: Row = {
            "answer": text,
            "answer_equal": answer.ids == reference.answer.ids,
            "ttft_ms": ttft,
            "speedup": reference.ttft_ms / ttft,  # to the full recompute of the same process
            "reused": counts.reused,
            "recomputed": counts.recomputed,
            "fresh": counts.fresh,
            "bytes_read": fused.bytes_read,
            "levels": fused.plan.levels,
            "holes": [one.reason for one in fused.plan.segments[:-1] if one.status == "miss" and one.ids],
        }
        if self.asked.request.answers:
            scores = score(text, self.asked.request.answers)
            row |= {"f1": scores.f1, "exact_match": scores.exact_match, "contains": scores.contains}
        return row


def continued(decoder: Decoder, fused: Fused, reference: Answer, logits: torch.Tensor, max_tokens: int) -> Answer:
    """The greedy answer over a fused cache that has just been teacher-forced through the reference's script.

    What a run says in the same words needs no generation: where its most probable tokens are the script's, the answer
    is the reference's; else generation goes on from the first other token.

    Parameters
    ----------
    logits : `[len(script), vocabulary]`, as `forced_logits` gave them.
    """
    script = reference.script
    said = logits.argmax(-1).tolist()
    agreed = next((n for n, (own, wanted) in enumerate(zip(said, script, strict=True)) if own != wanted), None)
    if agreed is None:
        return reference
    fused.cache.set_length(fused.plan.length + agreed)
    before = [*fused.plan.ids, *script[:agreed]]
    rest = generate(decoder, before, fused.cache, said[agreed], Sampling(max_tokens - agreed))
    return Answer((*script[:agreed], *rest.ids), rest.end)


def answer_text(decoder: Decoder, answer: Answer) -> str:
    """An answer as `kvtool query` shows it."""
    text: str = decoder.loaded.tokenizer.decode(
        list(answer.ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text.rstrip("\ufffd").strip()
