"""Paired run of a question: answered once in full, then by each run, with the run's distance to the full answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvtool.core.evaluate.measures import Row, score
from kvtool.core.evaluate.reference import SAME, Distance, Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan, build_plan
from kvtool.core.fusion.selectors import REFERENCE, selector_for
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Generated
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import PromptLayout
from kvtool.lab.measure.runs import RunSpec

NO_CONTEXT = "none"  # the run that answers without any chunk


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of one question, its prompt laid out.

    Attributes
    ----------
    source : of the records.
    options : their `max_tokens` bounds every answer; answers are greedy.
    """

    decoder: Decoder
    source: KVSource
    asked: PromptLayout
    options: QueryOptions

    def rows(self, specs: Sequence[RunSpec]) -> Iterator[tuple[str, Row]]:
        """Answer in full, then by each run, and name the rows; one cache is held at a time.

        The run `NO_CONTEXT` answers in full over the prompt's beginning and the question, without any chunk.
        """
        fused, full_ms = self._fuse(RunSpec(REFERENCE))
        reference = Reference.answered(self.decoder, fused, self.options.max_tokens)
        row = self._row(fused, full_ms, full_ms, reference.answer, reference.answer, SAME)
        del fused
        yield REFERENCE, row
        for spec in specs:
            trial = self._without_context() if spec.mode == NO_CONTEXT else self
            yield spec.name, trial._run(spec, reference, full_ms)

    def _without_context(self) -> Trial:
        alone = replace(self.asked, plan=without_chunks(self.asked.plan), hits=(), retrieve_ms=0.0)
        return replace(self, asked=alone)

    def _run(self, spec: RunSpec, reference: Reference, full_ms: float) -> Row:
        fused, milliseconds = self._fuse(spec)
        forced = reference.force(fused)
        answer = forced.answer(self.options.max_tokens)
        return self._row(fused, milliseconds, full_ms, answer, reference.answer, forced.distance)

    def _fuse(self, spec: RunSpec) -> tuple[Fused, float]:
        """Fuse as a run does, and time it in ms: from the question's text to the first token's id."""
        whole = RunSpec(REFERENCE) if spec.mode == NO_CONTEXT else spec
        selector = selector_for(whole.options(self.options), whole.mode)
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


def without_chunks(plan: Plan) -> Plan:
    """The same prompt's beginning and question, in the same form, with nothing between them."""
    prefix, *_, question = plan.segments
    return build_plan(prefix.source, [], question.ids)
