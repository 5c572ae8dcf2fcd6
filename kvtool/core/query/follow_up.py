"""What a follow-up question is searched by: its own words, and where they say little the questions before it, too.

Measured by `samples/benchmarks/follow_ups.py`. Answers are left out: those of small models lead astray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.core.query.reply import Request
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session

RARE = 0.05  # share of the chunks that a rare word stands in at most
ENOUGH = 4  # rare words of a question that is searched alone
NAMES = 3  # rare words of a question that says what is talked about
BACK = 16  # questions back at most: looking through all of them at each turn is quadratic


def searched(session: Session, request: Request, before: Sequence[str]) -> Request:
    """Return a request with the text that it is searched by, where it names no passages itself."""
    if request.chunks or request.documents or request.search:
        return request
    return replace(request, search=search_text(request.question, before, session.finder))


def search_text(question: str, before: Sequence[str], finder: Finder) -> str:
    """The text that a question is searched by.

    One that has fewer than `ENOUGH` rare words is searched together with those before it, back to the last that says
    what is talked about. It counts twice, so that a new subject is found beside the old one.

    Parameters
    ----------
    before : the questions before it, the last one last.
    """
    if not before or finder.rare_words(question, RARE) >= ENOUGH:
        return question
    context: list[str] = []
    for earlier in before[: -BACK - 1 : -1]:
        context.insert(0, earlier)
        if finder.rare_words(earlier, RARE) >= NAMES:
            break
    return " ".join([*context, question, question])
