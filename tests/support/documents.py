"""Writes a folder of documents in many formats, English and Korean, and the questions that each of them answers.

    python tests/support/documents.py FOLDER

`FOLDER/documents` holds the files, `FOLDER/questions.jsonl` a question for each, which `kvtool query --batch` takes;
`source` names the file with the page, slide, cell or line that has the answer. Needs kvtool[documents].
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
    return [_written(folder, ending, fact) for ending, fact in _plan()]


def _plan() -> Iterator[tuple[str, Fact]]:
    """Each language's facts go through the formats in turn, so that a format comes at least once in each."""
    for lang in ("en", "ko"):
        yield from zip(cycle(WRITERS), facts(lang))


def _written(folder: Path, ending: str, fact: Fact) -> Asked:
    path = folder / fact.lang / f"{fact.title.lower().replace(' ', '-')}.{ending}"
    path.parent.mkdir(exist_ok=True)
    place = WRITERS[ending](path, fact)
    file = path.relative_to(folder).as_posix()
    return Asked(fact.question, (fact.answer,), file, f"{file}{place}")


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    asked = write(folder / "documents")
    lines = (json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in asked)
    (folder / "questions.jsonl").write_text("".join(lines), "utf-8")
    print(f"{len(asked)} documents, and as many questions in {folder / 'questions.jsonl'}")


if __name__ == "__main__":
    main()
