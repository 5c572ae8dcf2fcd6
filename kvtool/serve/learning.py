"""Learning of passages that come again: which texts of clients are computed and stored, after their answers.

A client that retrieves by itself sends the same passages with many questions, in any order and next to other text. So
texts are compared by their token ids: of each that is not stored yet the server remembers the ids, and what stands in a
later request, too, has come again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtool.core.errors import NoSpaceError
from kvtool.core.retrieval.spotting import FEWEST, Span, Spotter, Tokens

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkSpec
    from kvtool.core.query.reply import Request
    from kvtool.core.session.learned import LearnedStore
    from kvtool.core.session.session import Session

_LEAST = 64  # tokens of a passage that is worth a chunk
_REMEMBERED = 1 << 20  # tokens of an owner's texts that came once: 4 MB, and 1 MB for the index
_ANCHORS = 1 << 12  # of a text, one in 24 tokens: part of it may come again
_REQUESTS, _CHUNKS = 64, 1024  # that wait at most; older ones are dropped for new ones
Run = tuple[int, int]  # first and end, in tokens


class SeenTexts:
    """Token ids of texts that came once, the latest ones."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, Tokens] = OrderedDict()
        self._tokens = 0
        self._spotter = Spotter(lambda digest: self._texts.get(digest, ()), _ANCHORS)

    def add(self, texts: Iterable[Sequence[int] | Tokens]) -> None:
        for ids in (np.array(text, np.uint32) for text in texts):
            digest = hashlib.blake2b(ids.tobytes(), digest_size=20).digest()
            self._tokens += 0 if digest in self._texts else len(ids)
            self._texts[digest] = ids
        while self._tokens > _REMEMBERED:
            self._tokens -= len(self._texts.popitem(last=False)[1])
        self._spotter.update(self._texts)

    def take(self, ids: Sequence[int]) -> list[Run]:
        """Return the parts of a text that came before, of at least `_LEAST` tokens, and forget that they came: what is
        evicted later has to come twice again."""
        joined = list[list[Span]]()
        for span in self._spotter.spot(ids):
            if joined and joined[-1][-1].stop == span.start:
                joined[-1].append(span)
            else:
                joined.append([span])
        taken = [spans for spans in joined if spans[-1].stop - spans[0].start >= _LEAST]
        stays = dict[bytes, NDArray[np.bool_]]()
        for span in chain.from_iterable(taken):
            mask = stays.setdefault(span.chunk_id, np.ones(len(self._texts[span.chunk_id]), np.bool_))
            mask[span.skipped : span.skipped + len(span)] = False
        left = list[Tokens]()
        for digest, mask in stays.items():
            text = self._texts.pop(digest)
            self._tokens -= len(text)
            ends = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
            left += [text[first:end] for first, end in ends if end - first >= _LEAST]
        if stays:
            self.add(left)
        return [(spans[0].start, spans[-1].stop) for spans in taken]


@dataclass(frozen=True, slots=True)
class _Passage:
    owner: str
    chunk: ChunkSpec
    text: str


class Learner:
    def __init__(self) -> None:
        self._seen: dict[str, SeenTexts] = {}  # by owner
        self._requests: deque[Request] = deque(maxlen=_REQUESTS)
        self._passages: deque[_Passage] = deque(maxlen=_CHUNKS)

    def __len__(self) -> int:
        return len(self._requests) + len(self._passages)

    def add(self, request: Request) -> None:
        if request.owner is not None:
            self._requests.append(request)

    def step(self, opened: Callable[[], Session]) -> None:
        """Do one step between answers."""
        waiting: deque[Any] = self._passages or self._requests
        try:
            session = opened()
            if session.learned is None:
                return
            with session.lock:
                if waiting is self._requests:
                    self._look_at(session, session.learned, waiting[0])
                else:
                    self._put(session, session.learned, waiting[0])
        except Exception as error:
            if isinstance(error, NoSpaceError) and waiting is self._passages:
                for passage in [one for one in waiting if len(one.chunk.ids) > len(waiting[0].chunk.ids)]:
                    waiting.remove(passage)  # it would fare alike
                    self._give_up(passage)
            self._give_up(waiting[0])
            raise
        finally:
            waiting.popleft()  # only now: `len` counts it as long as it is under way

    def _put(self, session: Session, learned: LearnedStore, passage: _Passage) -> None:
        """Compute and store a passage, unless another server has, or the store's lead-in or model is another now."""
        owner, chunk = passage.owner, passage.chunk
        stored = _stored(session, chunk.ids, owner)
        missing = len(chunk.ids) - sum(stop - start for start, stop in stored)
        if (not stored or missing >= _LEAST) and learned.wanted(owner, chunk.ids) == chunk:
            learned.put(owner, chunk, passage.text)

    def _give_up(self, step: Request | _Passage) -> None:
        if isinstance(step, _Passage):
            self._seen[step.owner].add([step.chunk.ids])

    def _look_at(self, session: Session, learned: LearnedStore, request: Request) -> None:
        from kvtool.core.model.tokens import encode

        owner, new = str(request.owner), list[Sequence[int]]()
        seen = self._seen.setdefault(owner, SeenTexts())
        for role, content in request.messages:
            if role == "assistant":
                continue
            ids = encode(session.tokenizer, content)  # it was answered, so it is no longer than the context
            for first, end in _between(_stored(session, ids, owner), len(ids)):
                text = ids[first:end]
                again = seen.take(text)
                new += [text[start:stop] for start, stop in _between(again, len(text))]
                for start, stop in again:
                    self._queue(session, learned, owner, text[start:stop])
        seen.add(new)

    def _queue(self, session: Session, learned: LearnedStore, owner: str, ids: Sequence[int]) -> None:
        from kvtool.core.corpus.split import split
        from kvtool.core.model.prompt import chunk_tokens
        from kvtool.core.model.tokens import count_tokens

        tokenizer, settings = session.tokenizer, session.identity.split
        text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False).strip("\ufffd")
        parts = [text[span.start : span.end] for span in split(text, settings, count_tokens(tokenizer), "text")]
        for part, own in zip(parts, chunk_tokens(tokenizer, parts), strict=True):
            passage = _Passage(owner, learned.wanted(owner, own), part)
            if len(own) >= FEWEST and passage not in self._passages:
                self._passages.append(passage)


def _stored(session: Session, ids: Sequence[int], owner: str) -> list[Run]:
    from kvtool.core.query.prompt import spot_all

    return [(span.start, span.stop) for span in spot_all(session, ids, owner)]


def _between(runs: Sequence[Run], length: int) -> Iterator[Run]:
    for first, end in zip([0, *(stop for _, stop in runs)], [*(start for start, _ in runs), length], strict=True):
        if end - first >= _LEAST:
            yield first, end
