"""What a conversation's turns compute, and how long their first token takes, with the kept cache and without it.

    python samples/turns.py STORE [--fusion MODE] [--rounds N]

STORE holds `samples/corpus`. Without the kept cache the same prompt is fused from its beginning: passages come from the
store, earlier questions and answers are computed. Both are timed in turn in this process: fusing alone, no retrieval.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from kvtool.core.cache.store import Store
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.query.conversation import Conversation
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply
from kvtool.core.session.session import Session

QUESTIONS = (
    "Where was Maud Pellerine the clockmaker born?",
    "What is painted on her earliest kitchen clock?",
    "And how many station clocks did the railway order?",
    "How long is the Storrigan Tunnel?",
    "And when was it electrified?",
)


class StartedOver:
    """The prompt of a conversation as if nothing of it stood."""

    def __init__(self) -> None:
        self._parts: list[Candidate] = []
        self._covered = 0

    def fuse(self, session: Session, reply: Reply) -> tuple[float, int]:
        """Milliseconds, and how many rows were computed at the last layer."""
        plan = reply.fused.plan
        first = plan.segments[0].source
        if not self._parts:
            self._add(first)
        elif len(first.ids) > self._covered:
            self._add(Candidate(first.ids[self._covered :], reason="an earlier turn"))
        for segment in plan.chunks:
            self._add(segment.source)
        prefix, *parts = self._parts
        whole = build_plan(prefix, parts, plan.segments[-1].ids)
        assert whole.text_ids == plan.text_ids
        started = time.perf_counter()
        fused = fuse(session.decoder, whole, reply.selector, session.source)
        return (time.perf_counter() - started) * 1e3, fused.tokens.recomputed + fused.tokens.fresh

    def _add(self, part: Candidate) -> None:
        self._parts.append(part)
        self._covered += len(part.ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--fusion", default="union")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    options = QueryOptions(fusion=given.fusion, top_k=3, max_tokens=12)
    rows: list[list[tuple[float, float]]] = [[] for _ in QUESTIONS]
    print("| turn | prompt | computed, kept | computed, started over | ms, kept | ms, started over |")
    print("| --- | --- | --- | --- | --- | --- |")
    with Store.open(given.store) as store:
        session = Session.open(store)
        for last in (number == given.rounds - 1 for number in range(given.rounds)):
            talk, over = Conversation.over(session, options), StartedOver()
            for number, (question, row) in enumerate(zip(QUESTIONS, rows, strict=True), 1):
                reply = talk.ask(question)
                took, computed = over.fuse(session, reply)
                row.append((reply.timing_ms["ttft"] - reply.timing_ms["retrieve"], took))
                if last:
                    counts = reply.tokens
                    kept = counts["recomputed"] + counts["fresh"]
                    times = " | ".join(f"{median(each):.0f}" for each in zip(*row, strict=True))
                    print(f"| {number} | {counts['prompt']:,} | {kept:,} | {computed:,} | {times} |", flush=True)


if __name__ == "__main__":
    main()
