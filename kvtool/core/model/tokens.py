"""Tokenisation of text: what a person or a document wrote stays text, even if it looks like a control token."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL_SHAPE = re.compile(r"<\S*>|\[\S*\]|\{\S*\}", re.DOTALL)
_SWITCH = threading.Lock()  # whether special tokens are parsed is a switch on the shared tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenise ordinary text: nothing is added, no control token is recognised in it."""
    return encode_batch(tokenizer, [text])[0]


def encode_batch(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise several ordinary texts, each on its own (see `encode`)."""
    suspicious = any(mark in text for text in texts for mark in "<[{")
    control = _unsplit_controls(tokenizer) if suspicious else None
    pieces = [_pieces(_printable(text), control) for text in texts]
    ids = iter(_run(tokenizer, [piece for parts in pieces for piece in parts], special=False))
    return [[i for _ in parts for i in next(ids)] for parts in pieces]


def encode_control(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a piece of chat template: control tokens are recognised, none is added."""
    return _run(tokenizer, [_printable(text)], special=True)[0]


def count_tokens(tokenizer: Any) -> Callable[[Sequence[str]], list[int]]:
    """Make a function from texts to their lengths in tokens, for the chunker."""

    def count(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in encode_batch(tokenizer, texts)]

    return count


def holds_control(tokenizer: Any, text: str) -> bool:
    """Return True if the text contains the spelling of a control token."""
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


def _printable(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8 and no token; one character stays one character."""
    return _SURROGATE.sub("\ufffd", text)


def _is_control(token: Any) -> bool:
    return bool(token.special) or _CONTROL_SHAPE.fullmatch(token.content) is not None


def _unsplit_controls(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the control tokens that the library recognises even when told not to.

    These were added, but not marked as special (`<think>`).
    """
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
