"""What an answer rests on: the recomputed tokens of each chunk (`query --explain`), and the sentences of the passages
(`query --cite`).

Citations follow from words in common. The attention of the answer's rows, which costs a pass of the model, was measured
for them and changed hardly one (samples/results/retrieval.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.tokens import whole_characters
from kvtool.core.query.reply import DROPPED, ChunkSpans, TokenSpan


def explain(fused: Fused, tokenizer: Any) -> list[ChunkSpans]:
    fates = [(segment, _fates(fused, segment)) for segment in fused.plan.passages]
    return [ChunkSpans(tuple(_spans(segment, each, tokenizer)), Counter(each)) for segment, each in fates]


def _fates(fused: Fused, segment: Segment) -> list[str]:
    if not segment.cached:
        return ["hole"] * len(segment.ids)
    tokens = range(len(segment.ids)) if segment.placed_rows is None else segment.placed_rows
    fates = ["" if segment.placed_rows is None else DROPPED] * len(segment.source.ids)
    for token in tokens:
        fates[token] = ""
    for reason, rows in fused.reasons.items():
        for place in rows[segment.start : segment.stop].nonzero()[:, 0].tolist():
            fates[tokens[place]] = reason
    return fates


def _spans(segment: Segment, fates: Sequence[str], tokenizer: Any) -> Iterator[TokenSpan]:
    """Yield spans of whole characters: a token that ends inside one belongs to the span of the next."""
    start, text, fate = 0, "", ""
    for begin, stop, piece in whole_characters(tokenizer, segment.source.ids):
        own = next((fates[place] for place in range(begin, stop) if fates[place]), "")
        if own != fate and begin > start:
            yield TokenSpan(start, begin, text, fate)
            start, text = begin, ""
        fate, text = own, text + piece
    if segment.source.ids:
        yield TokenSpan(start, len(segment.source.ids), text, fate)
