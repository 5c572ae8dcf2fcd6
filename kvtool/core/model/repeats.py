"""Repetition detection: a small model's answer that says the same again, and would until it is as long as it may be."""

from __future__ import annotations

import re

# A repetition begins where a line, a sentence or a clause does.
_START = re.compile(r"(?:(?<=[.!?,;:…])\s+|(?<=[。！？、，；：])\s*|\n\s*)(?=\S)")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"')\]”’»*_]*$")
_FENCE = "```"
_LETTERS_OF_SENTENCES, _LETTERS = 20, 40


class Repeats:
    """The end of a growing text, as far as the text said the same before.

    Two things are a repetition. Sentences of at least 20 letters that follow themselves, except in fenced code, which
    repeats lines for a reason. And anything of which three copies follow each other, the last two of at least 40
    letters. Numbers, rules and empty cells have no letters; lists and refrains have other words between.

    Attributes
    ----------
    begin : where that end begins, in characters; the text's length where its end is new.
    """

    def __init__(self) -> None:
        self.begin = 0

    def found(self, text: str) -> bool:
        """Look at what the text has become; return True if it repeats itself from `begin` on."""
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
