"""One question: answered once in full, then by each run, with the run's distance to the full answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtool.core.evaluate.measures import Row
from kvtool.core.evaluate.reference import SAME, Distance, Reference
from kvtool.core.evaluate.scoring import score
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.selectors import REFERENCE, selector_for
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Generated
from kvtool.core.query.layout import Asked
from kvtool.core.query.options import QueryOptions
from kvtool.lab.measure.runs import RunSpec


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
        """Answer in full, then by each run, and name the rows; one cache is held at a time."""
        fused, full_ms = self._fuse(RunSpec(REFERENCE))
        reference = Reference.answered(self.decoder, fused, self.options.max_tokens)
        row = self._row(fused, full_ms, full_ms, reference.answer, reference.answer, SAME)
        del fused
        yield REFERENCE, row
        for spec in specs:
            yield spec.name, self._run(spec, reference, full_ms)

    def _run(self, spec: RunSpec, reference: Reference, full_ms: float) -> Row:
        fused, milliseconds = self._fuse(spec)
        forced = reference.force(fused)
        answer = forced.answer(self.options.max_tokens)
        return self._row(fused, milliseconds, full_ms, answer, reference.answer, forced.distance)

    def _fuse(self, spec: RunSpec) -> tuple[Fused, float]:
        """Fuse as a run does, and time it in ms: from the question's text to the first token's id."""
        selector = selector_for(spec.options(self.options), spec.mode)
        started = time.perf_counter()
        fused = fuse(self.decoder, self.asked.plan, selector, self.source, reserve=self.options.max_tokens)
        fused.logits.argmax().item()
        return fused, self.asked.retrieve_ms + (time.perf_counter() - started) * 1e3

    def _row(
        self, fused: Fused, ttft_ms: float, full_ms: float, answer: Generated, full: Generated, distance: Distance
    ) -> Row:
        text, counts, gold = answer.text.strip(), fused.tokens, self.asked.request.answers
        return {
            "answer": text,
            "answer_equal": answer.ids == full.ids,
            "ttft_ms": ttft_ms,
            "speedup": full_ms / ttft_ms,  # to the full recompute of the same process
            "reused": counts.reused,
            "recomputed": counts.recomputed,
            "fresh": counts.fresh,
            "bytes_read": fused.bytes_read,
            "levels": fused.plan.levels,
            "holes": [one.reason for one in fused.plan.segments[:-1] if one.status == "miss" and one.ids],
            **(score(text, gold).to_json() if gold else {}),
            **distance.to_json(),
        }
