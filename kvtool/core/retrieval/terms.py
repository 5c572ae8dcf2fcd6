"""Text → search terms, for any script."""

from __future__ import annotations

import re
from functools import lru_cache

from kvtool.core.common.spelling import normalised

# Hangul, Kana and Han are written without (useful) spaces: Korean particles stick to their nouns, Chinese and Japanese
# have no word breaks. Overlapping character pairs find them all without a dictionary.
_UNSPACED = re.compile(
    "[\u1100-\u11ff\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]+"
)
_WORD = re.compile(r"\w+")
_LONGEST_KEPT = 64  # letters of a word whose terms are kept: longer ones would fill the memory
_ENDINGS = ("'s", "ies", "es", "s", "ed", "ing")
_STOPWORDS = frozenset(
    (
        "a an and are as at be been by did do does for from had has have he her him his how i in into is it its not of "
        "on or she that the their them they this to was we were what when where which who whom whose why will with you"
    ).split()
)


def terms(text: str) -> list[str]:
    """Search terms of `text` in order: words without common endings, and character pairs of unspaced scripts."""
    words = _WORD.findall(normalised("NFKC", text).casefold())
    return [term for word in words for term in (_known(word) if len(word) <= _LONGEST_KEPT else _of_word(word))]


@lru_cache(maxsize=1 << 17)
def _known(word: str) -> tuple[str, ...]:
    return _of_word(word)


def _of_word(word: str) -> tuple[str, ...]:
    parts: list[str] = []
    at = 0
    for run in _UNSPACED.finditer(word):
        parts += [*_plain(word[at : run.start()]), *_pairs(run.group())]
        at = run.end()
    return (*parts, *_plain(word[at:]))


def spellings(text: str) -> dict[str, str]:
    """The first word of `text` that gives each term: what a person would call it."""
    words: dict[str, str] = {}
    for word in _WORD.findall(normalised("NFKC", text)):
        for term in terms(word):
            words.setdefault(term, word)
    return words


def _pairs(run: str) -> list[str]:
    return [run] if len(run) == 1 else [run[i : i + 2] for i in range(len(run) - 1)]


def _plain(word: str) -> list[str]:
    if not word or word in _STOPWORDS:
        return []
    return [_stem(word)]


def _stem(word: str) -> str:
    """Cut one common English ending, so that `founded` finds `founding`; the rest must keep four letters."""
    if not word.isascii():
        return word
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word[: -len(ending)]
    return word
