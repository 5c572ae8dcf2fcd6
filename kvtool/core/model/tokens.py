"""Tokenisation of text, and streaming detokenisation of answers, with their stop texts and repetitions.

What a person or a document wrote stays text, even if it looks like a control token.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

OnText = Callable[[str], None]
_SURROGATE = re.compile("[\ud800-\udfff]")  # has no UTF-8 and no token; one character stays one character
_CONTROL_SHAPE = re.compile(r"<\S*>|\[\S*\]|\{\S*\}", re.DOTALL)
_SWITCH = threading.Lock()  # whether special tokens are parsed is a switch on the shared tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Nothing is added, and no control token is recognised."""
    return encode_batch(tokenizer, [text])[0]


def encode_batch(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    suspicious = any(mark in text for text in texts for mark in "<[{")
    control = _unsplit_controls(tokenizer) if suspicious else None
    pieces = [_pieces(_SURROGATE.sub("\ufffd", text), control) for text in texts]
    ids = iter(_run(tokenizer, [piece for parts in pieces for piece in parts], special=False))
    return [[i for _ in parts for i in next(ids)] for parts in pieces]


def encode_control(tokenizer: Any, text: str) -> list[int]:
    """Control tokens are recognised, none is added."""
    return _run(tokenizer, [_SURROGATE.sub("\ufffd", text)], special=True)[0]


def count_tokens(tokenizer: Any) -> Callable[[Sequence[str]], list[int]]:
    return lambda texts: [len(ids) for ids in encode_batch(tokenizer, texts)]


def holds_control(tokenizer: Any, text: str) -> bool:
    return any(token.content in text for token in tokenizer.added_tokens_decoder.values() if _is_control(token))


def whole_characters(tokenizer: Any, ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Decode ids in pieces of as few tokens as make whole characters: first, end, and the piece."""
    start = 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[start:stop]), clean_up_tokenization_spaces=False)
        if not text.endswith("\ufffd") or stop == len(ids):
            yield start, stop, text
            start = stop


def _run(tokenizer: Any, texts: list[str], *, special: bool) -> list[list[int]]:
    backend = tokenizer.backend_tokenizer
    with _SWITCH:
        backend.encode_special_tokens = not special
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _is_control(token: Any) -> bool:
    return bool(token.special) or _CONTROL_SHAPE.fullmatch(token.content) is not None


def _unsplit_controls(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of added control tokens that are not marked as special (`<think>`), and so always recognised."""
    names = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not token.special and len(token.content) > 1 and _is_control(token)
    ]
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _pieces(text: str, control: re.Pattern[str] | None) -> list[str]:
    """Cut the text once inside every control token, so that the token is spelled out."""
    if control is None:
        return [text]
    cuts = [0, *(match.start() + 1 for match in control.finditer(text)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


# Tokens that are turned into text again with every new one, and how many of them stay for the next ones to join on to:
# some tokenizers write a word's first token otherwise at the beginning of a text.
_WINDOW, _OVERLAP = 48, 8


class TextStream:
    """A stream of text made of token ids; a character is held back until all its bytes have arrived. Tokens of `ends`,
    and texts of `stops`, end the answer: those are cut off, and a beginning of one is held back. With `stop_repeats` so
    is a repetition."""

    def __init__(
        self,
        tokenizer: Any,
        ends: set[int],
        on_text: OnText | None,
        stops: Sequence[str] = (),
        stop_repeats: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._on_text = on_text
        self._stops = [stop for stop in stops if stop]
        self._repeats = Repeats() if stop_repeats else None
        self._lengths: list[int] = []  # of the text, by token
        self._shown = 0
        self._settled, self._start, self._known = "", 0, 0  # text that stays; tokens from here on; their text in it
        self.ids: list[int] = []
        self.text = ""
        self.ended_by: int | None = None  # token
        self.stopped_by: str | None = None  # text
        self.repeated = False

    @property
    def ended(self) -> bool:
        return self.ended_by is not None or self.stopped_by is not None or self.repeated

    def add(self, token: int) -> None:
        if self.ended:
            return
        if token in self._ends:
            self.ended_by = token
            return
        self.ids.append(token)
        self.text = self._settled + self._window()[self._known :]
        self._lengths.append(len(self.text))
        self._cut()
        if not self.text.endswith("�"):
            self._leave_repetition_out()
            self._show(len(self.text) - self._begun())
            if len(self.ids) - self._start >= _WINDOW:
                self._settled, self._start = self.text, len(self.ids) - _OVERLAP
                self._known = len(self._window())

    def _window(self) -> str:
        """Decode the last tokens: decoding all takes longer with every one, 0.4 ms for 600."""
        last = self.ids[self._start :]
        text: str = self._tokenizer.decode(last, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _cut(self) -> None:
        places = {stop: self.text.find(stop, self._shown) for stop in self._stops}
        ends = [stop for stop, start in places.items() if start >= 0]
        if ends:
            self.stopped_by = min(ends, key=places.__getitem__)
            self.text = self.text[: places[self.stopped_by]]

    def _leave_repetition_out(self) -> None:
        if self._repeats is not None and self.stopped_by is None and self._repeats.found(self.text):
            self.repeated = True
            self.text = self.text[: self._repeats.begin]
            del self.ids[bisect_right(self._lengths, len(self.text.rstrip())) :]

    def _begun(self) -> int:
        if self.ended:
            return 0
        repeated = 0 if self._repeats is None else len(self.text) - self._repeats.begin
        return max(repeated, *(_overlap(self.text, stop) for stop in self._stops), 0)

    def end(self) -> None:
        self.text = self.text.rstrip("\ufffd")
        self._show(len(self.text))

    def _show(self, length: int) -> None:
        if self._on_text is not None and length > self._shown:
            self._on_text(self.text[self._shown : length])
        self._shown = max(length, self._shown)


def _overlap(text: str, stop: str) -> int:
    end = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
    at = end.find(stop[0])
    while at >= 0 and not stop.startswith(end[at:]):
        at = end.find(stop[0], at + 1)
    return len(end) - at if at >= 0 else 0


# A repetition begins where a line, a sentence or a clause does.
_START = re.compile(r"(?:(?<=[.!?,;:…])\s+|(?<=[。！？、，；：])\s*|\n\s*)(?=\S)")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"')\]”’»*_]*$")
_FENCE = "```"
_LETTERS_OF_SENTENCES, _LETTERS = 20, 40


class Repeats:
    """Repetition detection. Either sentences of at least 20 letters follow themselves, except in fenced code; or three
    copies of anything follow each other, the last two of at least 40 letters. Lists and refrains have other words
    between."""

    def __init__(self) -> None:
        self.begin = 0  # where that end begins, in characters; the text's length where its end is new

    def found(self, text: str) -> bool:
        seen = len(text[: self.begin].rstrip())
        for match in _START.finditer(text, seen):
            if match.end() >= self.begin and text.find(text[match.end() :]) < match.end():
                self.begin = match.end()
                return self._is_repetition(text)
        self.begin = len(text)
        return False

    def _is_repetition(self, text: str) -> bool:
        end = text[self.begin :]
        period = self.begin - text.rfind(end, 0, len(text) - 1)
        if len(end) >= 2 * period and _letters(end) >= _LETTERS:
            return True
        block = text[self.begin - period : self.begin].rstrip()
        return (
            len(end.rstrip()) >= len(block)
            and _letters(block) >= _LETTERS_OF_SENTENCES
            and _SENTENCE_END.search(block) is not None
            and text.count(_FENCE, 0, self.begin) % 2 == 0
        )


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))
