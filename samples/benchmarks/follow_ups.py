"""Whether retrieval finds what follow-up questions are about, by what they are searched by.

    python samples/benchmarks/follow_ups.py STORE [QUESTIONS]

STORE holds `samples/corpus`; the made-up questions are in `follow_ups.jsonl`: `vague` ones behind one turn,
`second` ones behind several, and `other` ones that change the subject. The rule was chosen on those; for the ones of
`follow_ups_held_out.jsonl` STORE holds `kvtool/docs` besides, but for its JSON, reference and trips pages. No
language model is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.errors import NothingFoundError
from kvtool.core.query.conversation import search_text
from kvtool.core.retrieval.finder import Finder, Retrieval

FOUND = 5
Rule = Callable[[str, Sequence[str], Finder], str]
RULES: dict[str, Rule] = {
    "itself": lambda question, before, finder: question,
    "with the question before": lambda question, before, finder: f"{before[-1]} {question}",
    "with all before": lambda question, before, finder: " ".join([*before, question]),
    "kvtool": search_text,
}


def found(finder: Finder, text: str, source: str) -> list[bool]:
    """Of each chunk that is found, the best first, whether it is of the document."""
    try:
        hits = finder.find(text, FOUND, Retrieval("bm25"))
    except NothingFoundError:
        return []
    return [hit.passage.source.partition("#")[0].endswith(source) for hit in hits]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("questions", type=Path, nargs="?", default=Path(__file__).parent / "follow_ups.jsonl")
    given = parser.parse_args()
    lines = given.questions.read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    print(
        f"searched by: of each kind, in how many the document is among {FOUND} chunks, and how many of them are of it"
    )
    with Store.open(given.store) as store:
        finder = Finder(store)
        for name, rule in RULES.items():
            told = []
            for kind in kinds:
                of_kind = [row for row in rows if row["kind"] == kind]
                texts = [rule(row["question"], [asked for asked, _ in row["talked"]], finder) for row in of_kind]
                hits = [found(finder, text, row["source"]) for text, row in zip(texts, of_kind, strict=True)]
                each = sum(map(sum, hits)) / len(hits)
                told.append(f"{kind} {sum(map(any, hits))} of {len(hits)}, {each:.1f} chunks")
            print(f"{name}: {'; '.join(told)}")


if __name__ == "__main__":
    main()
