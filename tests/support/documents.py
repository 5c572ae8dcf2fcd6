"""Writes a folder of documents in many formats, English and Korean, and the questions that each of them answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tests.support.office.facts import Fact, facts
from tests.support.office.writers import WRITERS


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, its answer, the file that holds it, and the source that a reply has to name, both below the folder of
    documents."""

    question: str
    answers: tuple[str, ...]
    file: str
    source: str


def write(folder: Path) -> list[Asked]:
    """Write a document of every format for every few facts, English and Korean; returns the questions."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = (pair for lang in ("en", "ko") for pair in zip(cycle(WRITERS), facts(lang), strict=False))
    return [_written(folder, ending, fact) for ending, fact in plan]


def _written(folder: Path, ending: str, fact: Fact) -> Asked:
    path = folder / fact.lang / f"{fact.title.lower().replace(' ', '-')}.{ending}"
    path.parent.mkdir(exist_ok=True)
    place = WRITERS[ending](path, fact)
    file = path.relative_to(folder).as_posix()
    return Asked(fact.question, (fact.answer,), file, f"{file}{place}")
