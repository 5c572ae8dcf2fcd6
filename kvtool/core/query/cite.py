"""Citations: the sentences of the passages that each sentence of an answer rests on (`query --cite`)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from kvtool.core.common.types import Ids
from kvtool.core.corpus.outline import Level, Unit, units
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.plan import Segment
from kvtool.core.kernels.attention.eager import mean_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.prompt import chunk_token_ends
from kvtool.core.model.states import StateCache
from kvtool.core.query.reply import Citation
from kvtool.core.retrieval.passages import Passage, place_and_text
from kvtool.core.retrieval.terms import language_of, terms

if TYPE_CHECKING:
    from kvtool.core.model.generate import Generated
    from kvtool.core.model.prompt_cache import PromptCache
    from kvtool.core.query.iterative import Outcome
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.query.reply import ReplyChunk
    from kvtool.core.session.session import Session


_FROM_DEPTH = 0.5  # share of the layers before those whose attention counts
OF_WORDS = 3.0
"""Weight of words in common, where that of attention is 1."""


class Begun(Protocol):
    """Protocol of an answer whose prompt is in memory: `PreparedAnswer`."""

    @property
    def session(self) -> Session: ...

    @property
    def asked(self) -> PromptLayout: ...

    @property
    def outcome(self) -> Outcome: ...

    @property
    def chunks(self) -> Sequence[ReplyChunk]: ...

    @property
    def again(self) -> Sequence[ReplyChunk]: ...


def cite(begun: Begun, said: Generated, of_words: float = OF_WORDS) -> list[Citation]:
    """Find the sentence of a passage that each sentence of an answer rests on.

    Two measures add up, each as a share of its largest value: the attention of the rows that the sentence's tokens were
    chosen from, and rare words in common, of the first sentence with the question, which it answers, and of a later one
    with itself. samples/results/citations.md compares them.

    Parameters
    ----------
    of_words : weight of words in common; 0: only attention counts.

    Returns
    -------
    In the order of the answer; none where the prompt has no passage whose text the store still has.
    """
    session, request = begun.session, begun.asked.request
    with session.lock:
        sentences, text = passage_sentences(begun), said.text.strip()
        spans = sentences_of(text)
        if not sentences or not spans:
            return []
        seen = attention_to(begun, said.ids, sentences)
    before = said.text.find(text)
    tokens = _tokens_in(session.tokenizer, said.ids, [(before + start, before + end) for start, end in spans])
    words = RareWords([sentence.text for sentence in sentences])
    roots = torch.tensor([max(1, len(sentence.rows)) for sentence in sentences]).sqrt()
    numbers: dict[Sentence, int] = {}
    found: list[Citation] = []
    for (start, end), part in zip(spans, tokens, strict=True):
        about = text[start:end] if found else request.search or request.question
        worth = of_words * _scaled(words.common(about))
        if seen is not None:
            worth += _scaled(seen[part].sum(0) / roots)
        best = sentences[int(worth.argmax())]
        number = numbers.setdefault(best, len(numbers) + 1)
        found.append(_citation(session, best, number, (start, end)))
    return found


def _scaled(values: torch.Tensor) -> torch.Tensor:
    return values / values.max().clamp_min(1e-9)


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

    def common(self, text: str) -> torch.Tensor:
        """Return the weight of the words that each text has in common with another, float32 `[texts]`."""
        words = self._words(text)
        return torch.tensor([sum(self._weights[word] for word in words & own) for own in self._of])


# ---- the sentences of passages ----


class Sentence(NamedTuple):
    """A sentence of a passage. `start`, `end`: characters of the passage; `rows`: its places in the prompt cache."""

    chunk: ReplyChunk
    start: int
    end: int
    rows: tuple[int, ...]

    @property
    def text(self) -> str:
        """Return it on one line."""
        return " ".join(self.chunk.text[self.start : self.end].split())


def sentences_of(text: str, kind: str = "text") -> list[tuple[int, int]]:
    """Return the characters of each sentence of a text, without white space around it, and without titles: lines of
    their own that no stop ends; those only if there is nothing else."""
    found = [(unit, text[unit.start : unit.end]) for unit in units(text, kind)] if text.strip() else []
    spans = [(_is_title(one, part), _stripped(text, one.start, one.end)) for one, part in found if part.strip()]
    return [span for is_title, span in spans if not is_title] or [span for _, span in spans]


def _is_title(unit: Unit, part: str) -> bool:
    return unit.heading or (part.endswith("\n\n") and unit.level >= Level.PARAGRAPH and part.strip()[-1].isalnum())


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def passage_sentences(begun: Begun) -> list[Sentence]:
    """Return the sentences of all passages in an answer's prompt, those of earlier turns among them."""
    plan = begun.outcome.fused.plan
    pairs = [*zip(begun.chunks, plan.passages, strict=True), *((chunk, plan.segments[0]) for chunk in begun.again)]
    return [sentence for chunk, segment in pairs for sentence in _of_chunk(begun.session, chunk, segment)]


def _of_chunk(session: Session, chunk: ReplyChunk, segment: Segment) -> Iterator[Sentence]:
    ids, ends = chunk_token_ends(session.tokenizer, chunk.text)
    if (shift := _shift(ids, segment.source.ids)) is None:
        return
    kept = range(len(segment.source.ids)) if segment.kept is None else segment.kept
    places = {token + shift: segment.start + row for row, token in enumerate(kept)}
    for start, end in sentences_of(chunk.text, _kind(session, chunk.source)):
        tokens = range(bisect_right(ends, start), bisect_left(ends, end) + 1)
        yield Sentence(chunk, start, end, tuple(places[token] for token in tokens if token in places))


def _kind(session: Session, source: str) -> str:
    with suppress(DamagedError):
        document = session.store.document(source)
        return "text" if document is None else document.kind
    return "text"


def _shift(ids: Ids, of: Ids) -> int | None:
    """Return what to add to a token's number in a segment to get that in a chunk: one has all tokens of the other."""
    short, long = sorted((ids, of), key=len)
    at = next((at for at in range(len(long) - len(short) + 1) if long[at : at + len(short)] == short), None)
    return at if at is None or long is ids else -at


# ---- what an answer's sentences look at ----


class _Watch:
    """Attention of appended rows to sentences, the mean over heads and over the layers that see all of the prompt.

    Attributes
    ----------
    layers : how many layers counted.
    """

    def __init__(self, first: int, start: int, count: int, owners: torch.Tensor, sentences: int) -> None:
        self._first, self._start, self._owners, self.layers = first, start, owners, 0
        self._total = torch.zeros((count, sentences + 1), device=owners.device)

    @property
    def mean(self) -> torch.Tensor:
        """Return the attention, float32 `[rows, sentences]`."""
        return self._total[:, :-1].cpu() / max(1, self.layers)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        """Add a layer's attention of a piece of the rows."""
        if layer < self._first or scoring.window is not None:
            return
        rows = range(key.shape[2] - query.shape[2], key.shape[2])
        weights = mean_weights(query[0], key[0], KeyRanges.run(rows, None, key.device), scoring)
        own = self._total[rows.start - self._start : rows.stop - self._start]
        own.index_add_(1, self._owners, weights[:, : len(self._owners)])
        self.layers += rows.start == self._start


def attention_to(begun: Begun, ids: Sequence[int], sentences: Sequence[Sentence]) -> torch.Tensor | None:
    """Measure the attention of an answer to sentences: the prompt's last row and the answer's are computed once more.

    The cache is as it was afterwards, to the bit.

    Returns
    -------
    float32 `[len(ids), sentences]`: row i is that which token i was chosen from. None: the model keeps states, and its
    rows cannot be computed once more.
    """
    decoder, fused = begun.session.decoder, begun.outcome.fused
    cache, start = fused.cache, fused.plan.length - 1
    if isinstance(cache, StateCache):
        why = "the model keeps states, and attention cannot be measured again"
        begun.session.warn_once(f"citations follow from words in common only: {why}", "")
        return None
    owners = torch.full((fused.plan.length,), len(sentences))
    for number, sentence in enumerate(sentences):
        owners[list(sentence.rows)] = number
    first = int(_FROM_DEPTH * len(decoder.layers))
    watch = _Watch(first, start, len(ids), owners.to(decoder.device), len(sentences))
    with _restored(cache, start):
        cache.set_length(start)
        decoder.append((fused.plan.segments[-1].ids[-1], *ids[:-1]), cache, watch)
    return watch.mean


@contextmanager
def _restored(cache: PromptCache, start: int) -> Iterator[None]:
    """Bring the rows of a cache from `start` on back to what they were before."""
    length = cache.get_seq_length()
    before = [tuple(side[:, :, start:length].clone() for side in (one.keys, one.values)) for one in cache.buffers]
    try:
        yield
    finally:
        cache.set_length(length)
        for buffer, (keys, values) in zip(cache.buffers, before, strict=True):
            buffer.keys[:, :, start:length], buffer.values[:, :, start:length] = keys, values


def _tokens_in(tokenizer: Any, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[slice]:
    """Return which tokens of an answer are in each of these spans of its text."""

    def length(count: int) -> int:
        text: str = tokenizer.decode(ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return len(text)

    counts = range(len(ids) + 1)
    return [
        slice(max(0, bisect_right(counts, start, key=length) - 1), bisect_left(counts, end, key=length))
        for start, end in spans
    ]
