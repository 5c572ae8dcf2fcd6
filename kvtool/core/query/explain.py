"""What an answer rests on: the recomputed tokens of each chunk (`query --explain`), and the sentences of the passages
(`query --cite`).

Citations follow from words in common. The attention of the answer's rows, which costs a pass of the model, was measured
for them and changed hardly one (samples/results/retrieval.md).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtool.core.corpus.outline import Level, Unit, finer, units
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.tokens import whole_characters
from kvtool.core.query.reply import DROPPED, ChunkSpans, Citation, TokenSpan
from kvtool.core.retrieval.passages import Passage, place_and_text
from kvtool.core.retrieval.terms import language_of, terms

if TYPE_CHECKING:
    from kvtool.core.query.reply import ReplyChunk
    from kvtool.core.session.session import Session


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


def cite(
    session: Session, question: str, chunks: Iterable[ReplyChunk], answer: str, search: str = ""
) -> list[Citation]:
    """Find the passage's sentence that each sentence of an answer rests on: that with most rare words in common. The
    first sentence of the answer is compared by the question's words, a later one by its own; the question, then
    `search`, decides where those do not. Lines of code have no citation."""
    best_first = sorted(chunks, key=lambda chunk: -(chunk.score or 0))  # of sentences with equal words the first counts
    sentences, spans = passage_sentences(session, best_first), _answer_sentences(answer)
    if not sentences:
        return []
    words = RareWords([sentence.text for sentence in sentences])
    numbers: dict[Sentence, int] = {}
    found: list[Citation] = []
    for start, end in spans:
        own = [answer[start:end]] if found else []
        best = sentences[words.nearest(*own, question, search)]
        number = numbers.setdefault(best, len(numbers) + 1)
        found.append(_citation(session, best, number, (start, end)))
    return found


def _citation(session: Session, sentence: Sentence, number: int, answer: tuple[int, int]) -> Citation:
    chunk = sentence.chunk
    start, end = chunk.start + sentence.start, chunk.start + sentence.end
    place, _ = place_and_text(session.store, Passage(bytes.fromhex(chunk.id), chunk.source, start, end, 0))
    return Citation(number, *answer, chunk.id, chunk.source, place.line, place.label, start, end, sentence.text)


class RareWords:
    """Words of some texts; one weighs the more the fewer of the texts have it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._language = language_of(" ".join(texts))
        self._of = [self._words(text) for text in texts]
        counts = Counter(word for words in self._of for word in words)
        self._weights = {word: math.log1p(len(texts) / count) for word, count in counts.items()}

    def _words(self, text: str) -> set[str]:
        return set(terms(text, self._language)[0])

    def nearest(self, *texts: str) -> int:
        """Return the number of the text whose words in common with `texts` weigh most; ties go by the next of `texts`,
        then to the first."""
        asked = [self._words(text) for text in texts]
        worth = [[sum(self._weights[word] for word in words & own) for words in asked] for own in self._of]
        return max(range(len(worth)), key=worth.__getitem__)


# ---- the sentences of passages ----

_WORD = re.compile(r"[^\W_]")


class Sentence(NamedTuple):
    """A sentence of a passage. `start`, `end`: characters of the passage."""

    chunk: ReplyChunk
    start: int
    end: int

    @property
    def text(self) -> str:
        return " ".join(self.chunk.text[self.start : self.end].split())


def sentences_of(text: str, kind: str = "text") -> list[tuple[int, int]]:
    """Return the characters of each sentence of a text, without white space around it, and without titles: lines of
    their own that no stop ends; those only if there is nothing else. Tables and code are cut into lines. What has no
    letter or digit (rules, fences) is no sentence."""
    pieces = [piece for unit in units(text, kind) for piece in _lines(text, unit)] if text.strip() else []
    found = [(unit, part) for unit in pieces if _WORD.search(part := text[unit.start : unit.end])]
    spans = [(_is_title(one, part), _stripped(text, one.start, one.end)) for one, part in found]
    return [span for is_title, span in spans if not is_title] or [span for _, span in spans]


def _answer_sentences(answer: str) -> list[tuple[int, int]]:
    parts = units(answer, "markdown") if answer.strip() else []
    fences = [unit for unit in parts if answer[unit.start : unit.end].lstrip().startswith(("```", "~~~"))]
    spans = sentences_of(answer, "markdown")
    return [span for span in spans if not any(fence.start <= span[0] < fence.end for fence in fences)]


def _lines(text: str, unit: Unit) -> list[Unit]:
    whole = unit.finest == Level.SENTENCE and "\n" in text[unit.start : unit.end].strip()  # a table, or a fence
    return finer(text, unit) if whole else [unit]


def _is_title(unit: Unit, part: str) -> bool:
    return unit.heading or (part.endswith("\n\n") and unit.level >= Level.PARAGRAPH and part.strip()[-1].isalnum())


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def passage_sentences(session: Session, chunks: Iterable[ReplyChunk]) -> list[Sentence]:
    return [
        Sentence(chunk, *span) for chunk in chunks for span in sentences_of(chunk.text, _kind(session, chunk.source))
    ]


def _kind(session: Session, source: str) -> str:
    with suppress(DamagedError):
        document = session.store.document(source)
        return "text" if document is None else document.kind
    return "text"
