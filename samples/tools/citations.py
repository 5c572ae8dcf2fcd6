"""Share of answers whose first citation is a sentence that people marked, and what simpler rules reach.

    python samples/tools/citations.py {hotpotqa|squad} INPUT.json FOLDER [--model MODEL] [--limit N] [--paragraphs N]
                                      [--fusion MODE] [--max-tokens N]

Documents and questions are those of `samples/tools/eval.py`; the store in FOLDER is made on the first run. A sentence
is right if it is a supporting fact (HotpotQA) or has the answer's span (SQuAD, XQuAD, KorQuAD). The rules choose among
the sentences of the same prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.ingest.job import ingest
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.generate import generate
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.answer import load_and_fuse
from kvtool.core.query.explain import RareWords, Sentence, cite, passage_sentences, sentences_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request, read_batch
from kvtool.core.retrieval.terms import terms
from kvtool.core.session.session import Session
from kvtool.reports.summary import interval
from samples.tools import eval as sets

CITED = "`--cite`"
RULES: dict[str, Callable[[list[Sentence], str, str], Sentence]] = {
    "(a) first sentence of the best passage": lambda sentences, question, answer: sentences[0],
    "(b) most words in common with the answer": lambda sentences, question, answer: nearest(sentences, answer, False),
    "rare words in common with the answer": lambda sentences, question, answer: nearest(sentences, answer),
}


def marked_sentences(kind: str, data: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the id of each question and its marked sentences, each on one line."""
    if kind == "hotpotqa":
        for row in data:
            context = dict(row["context"])
            facts = [context[title][at] for title, at in row["supporting_facts"] if at < len(context.get(title, ()))]
            yield row.get("_id") or row["id"], [" ".join(fact.split()) for fact in facts]
        return
    for block in (block for article in data["data"] for block in article["paragraphs"]):
        text = block["context"]
        spans = sentences_of(text)
        for row in block["qas"]:
            starts = [answer["answer_start"] for answer in row["answers"]]
            found = [text[start:end] for start, end in spans if any(start <= at < end for at in starts)]
            yield str(row["id"]), [" ".join(one.split()) for one in found]


def is_right(text: str, marked: list[str]) -> bool:
    """Return True if a sentence has a marked one, or most of it."""
    return any(one in text or (text in one and 2 * len(text) >= len(one)) for one in marked)


def nearest(sentences: list[Sentence], text: str, rare: bool = True) -> Sentence:
    """Return the sentence with most words in common; of equals the first."""
    if rare:
        return sentences[RareWords([one.text for one in sentences]).nearest(text)]
    words = set(terms(text)[0])
    return max(sentences, key=lambda one: len(words & set(terms(one.text)[0])))


def opened(given: argparse.Namespace) -> Store:
    """Open the store, made of the set's documents on the first run."""
    limits = ["--limit", str(given.limit)] + (["--paragraphs", str(given.paragraphs)] if given.paragraphs else [])
    if sets.main([given.format, str(given.input), str(given.folder), *limits]):
        raise SystemExit(1)
    path = given.folder / "store"
    ingest(path, IngestOptions.of({"paths": (given.folder / "corpus",), "model": given.model}))
    return Store.open(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=("hotpotqa", "squad"))
    parser.add_argument("input", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--paragraphs", type=int)
    parser.add_argument("--fusion", default="union")
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    marked = dict(marked_sentences(given.format, sets.load(given.input)))
    options = QueryOptions(fusion=given.fusion, max_tokens=given.max_tokens)
    rows: list[dict[str, bool]] = []
    times: list[float] = []
    counts: list[int] = []
    with opened(given) as store:
        session = Session.open(store, ModelOptions())
        for request in read_batch(given.folder / "batch.jsonl"):
            row, taken, count = asked(session, request, options, marked[request.id or ""])
            rows.append(row)
            times.append(taken)
            counts.append(count)
            print(f"{len(rows)} {request.question[:60]!r} {row}", file=sys.stderr, flush=True)
    taken = f"median {statistics.median(times):.0f} ms of processor time"
    print(f"{len(rows)} questions, {statistics.mean(counts):.1f} sentences each; {taken}")
    print("\n".join(table(rows)))


def table(rows: list[dict[str, bool]]) -> Iterator[str]:
    """Yield the lines of a table: of each rule the share that is right, and by how much `--cite` is above it, with the
    95 % interval of that, paired by question."""
    right = [row for row in rows if row["answer"]]
    yield f"| rule | all answers | {len(right)} right answers | `--cite` minus the rule |\n| --- | --- | --- | --- |"
    for name in (name for name in rows[0] if name != "answer"):
        shares = [f"{statistics.mean(row[name] for row in some):.2f}" if some else "-" for some in (rows, right)]
        found = interval([float(row[CITED]) - float(row[name]) for row in rows])
        low, high = found or (0.0, 0.0)
        yield f"| {name} | {' | '.join(shares)} | {'' if name == CITED else f'{low:+.2f} to {high:+.2f}'} |"


def asked(
    session: Session, request: Request, options: QueryOptions, marked: list[str]
) -> tuple[dict[str, bool], float, int]:
    """Answer a question; return whether each rule's sentence is a marked one, the milliseconds of processor time,
    and the number of sentences."""
    with session.lock, session.store.view():
        begun = load_and_fuse(session, lay_out(session, request, options), options)
        first, *more = begun.known
        said = generate(session.decoder, begun.outcome.fused.cache, first, begun.sampling, None, more)
    text, started = said.text.strip(), time.process_time()
    cited = cite(session, request.question, begun.chunks, text)
    taken = (time.process_time() - started) * 1e3
    sentences = passage_sentences(session, sorted(begun.chunks, key=lambda chunk: -(chunk.score or 0)))
    opening = next((text[start:end] for start, end in sentences_of(text)), "")
    row = {CITED: bool(cited) and is_right(cited[0].text, marked)}
    rules = {name: is_right(rule(sentences, request.question, opening).text, marked) for name, rule in RULES.items()}
    row |= rules | {"any sentence of the prompt": any(is_right(one.text, marked) for one in sentences)}
    row["answer"] = any(one.casefold() in text.casefold() for one in request.answers)
    return row, taken, len(sentences)


if __name__ == "__main__":
    main()
