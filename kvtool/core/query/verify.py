"""Verified answers (`--verify`): full prefill checks an answer after it was given, and corrects it.

What a fused cache says is a draft, shown at once. Full prefill of the very same prompt then runs into the same buffers,
and the draft's tokens follow it as far as full prefill would have chosen them; the rest is generated from there. All
rows are those of `--fusion full`, bit by bit, so the final answer is its own, token by token.

Draft cheaply and verify exactly is the idea of Lynx (arXiv 2607.01831), for compressed caches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.plan import Plan, build_plan, extend_plan
from kvtool.core.model.generate import Generated
from kvtool.core.query.reply import Verified


@dataclass(frozen=True, slots=True)
class Check:
    """A draft, and full prefill of its prompt in the draft's buffers (`exact`). `known`: full prefill's tokens as far
    as the draft agrees, and the first other one; all but the last have rows. `since`: end of the draft
    (`time.perf_counter`)."""

    draft: Generated
    exact: Fused
    known: Sequence[int]
    since: float
    prefill_ms: float

    def verdict(self, generated: Generated, first_ms: float) -> Verified:
        """Return what became of the draft. `generated`: by full prefill. `first_ms`: to the draft's first token."""
        agreed = [ours == theirs for ours, theirs in zip(self.known, self.draft.script, strict=False)]
        draft = self.draft.text.strip()
        checking_ms = (time.perf_counter() - self.since) * 1e3
        return Verified(
            accepted=min(sum(agreed), len(self.draft.ids)),
            drafted=len(self.draft.ids),
            draft=None if draft == generated.text.strip() else draft,
            first_ms=first_ms,
            prefill_ms=self.prefill_ms,
            final_ms=first_ms + self.draft.milliseconds + checking_ms,
        )


def uncached_plan(plan: Plan, has_prefix: bool) -> Plan:
    """Return the plan of the same prompt in full; the first segment is what earlier turns left, and exact, if
    `has_prefix`."""
    first, *chunks, question = plan.segments
    build = extend_plan if has_prefix else build_plan
    return build(first.source, [segment.source for segment in chunks], question.source.ids)
