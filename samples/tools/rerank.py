"""Whether a few heads' attention to stored keys ranks found chunks better than the words do.

    python samples/tools/rerank.py look FORMAT INPUT OUT [--model M] [--questions N] [--candidates N] …
    python samples/tools/rerank.py judge OUT …

`look` finds each question's candidates by words and second hop, prefills them after the warm lead-in as a store has
them, and computes the question after the same lead-in. Each candidate's keys are put right before the question. A
head's score of a candidate is its largest weight (`max`) or the sum of its weights (`sum`) under a softmax over all
candidates, the mean over the question's tokens; calibrated, the same of the question "N/A" is taken away (QRHead, arXiv
2506.09944; ICR, arXiv 2410.02642). FORMAT `store`: a batch file with sources, asked of the store `--store`.

`judge` reports each half of a set with the heads and the weight that serve the other half best, then the whole set with
those that serve all other sets best; with `--chosen-on` only with those of these files. Intervals are paired, 95 % of
10,000 resamples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.modules import ForwardEnded
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.prompt import chunk_tokens, lead_in_ids, prompt_parts, question_tokens
from kvtool.core.retrieval.finder import Finder, Retrieval
from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.passages import Passage, found_by
from kvtool.core.retrieval.search import Search
from kvtool.core.retrieval.segment import IndexSegment, MarkedDocument
from kvtool.reports.intervals import interval
from samples.benchmarks.recall import document
from samples.tools.eval import READERS, load

AT = 4096  # place of the question's first token; a chunk's last one is right before it
ASKS = 2  # tokens of "Question:"
WAYS = tuple(itertools.product(("max", "sum"), (False, True)))  # and whether calibrated
HEADS, WEIGHTS = (1, 2, 4, 8, 16), (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
BATCH = 1536  # tokens prefilled at once
Array = np.ndarray[Any, Any]
Scored = Callable[["Asked"], Array]


@dataclass
class Asked:
    """A question: its candidates, best first, with the gold document of each or None, and their score by words."""

    question: str
    gold: list[str]
    texts: list[str]
    golds: list[str | None]
    words: Array
    heads: dict[tuple[str, bool], Array]  # by way, `[candidates, layers · heads]`, scaled to mean 0 and deviation 1

    def score(self, order: Array) -> tuple[float, float]:
        """The reciprocal rank of the first gold candidate, and the share of gold documents among the first five."""
        ranked = [self.golds[at] for at in np.argsort(-order, kind="stable")]
        first = next((at for at, one in enumerate(ranked, 1) if one), 0)
        return 1 / first if first else 0.0, len({one for one in ranked[:5] if one}) / len(self.gold)


# --- look


def from_set(given: argparse.Namespace) -> Iterator[Asked]:
    examples = list(READERS[given.format](load(given.input)))
    bodies = dict.fromkeys(p.body for example in examples for p in example.paragraphs)
    entries = {entry.source: entry for entry in (document(number, body) for number, body in enumerate(bodies))}
    index = Index.empty()
    index.segments = [IndexSegment.build([MarkedDocument(bytes(20), bytes(16), entry) for entry in entries.values()])]

    def text(passage: Passage) -> str:
        return found_by(entries[passage.source])[passage.index]

    for example in examples[given.first :: max(1, len(examples) // (given.first + given.questions))][: given.questions]:
        gold = list(dict.fromkeys(p.body for p in example.paragraphs if p.supporting))
        hits = Search(index, text).best(example.question, given.candidates)
        texts = [entries[hit.passage.source].text for hit in hits]
        words = np.array([hit.score for hit in hits])
        yield Asked(example.question, gold, texts, [one if one in gold else None for one in texts], words, {})


def from_store(given: argparse.Namespace) -> Iterator[Asked]:
    finder = Finder(Store.open(given.store))
    rows = [json.loads(line) for line in given.input.read_text("utf-8").splitlines()]
    for row in rows[given.first :: max(1, len(rows) // (given.first + given.questions))][: given.questions]:
        gold = row.get("sources") or [row["source"]]
        hits = finder.find(row["question"], given.candidates, Retrieval()).hits
        texts = [finder.own_text(hit.passage) or "" for hit in hits]
        golds = [next((one for one in gold if f"/{one}" in hit.passage.source), None) for hit in hits]
        yield Asked(row["question"], gold, texts, golds, np.array([hit.score for hit in hits]), {})


class Reader:
    """A model with the lead-in of its chunks and questions."""

    def __init__(self, name: str, layers: int | None) -> None:
        self.decoder = Decoder(load_model(resolve(name, offline=True), packed=True))
        self.tokenizer, self.rotary = self.decoder.loaded.tokenizer, self.decoder.rotary
        self.parts = prompt_parts(self.tokenizer)
        self.lead_in = LeadIn(self.decoder, lead_in_ids("warm", self.tokenizer, self.parts))
        self.layers = min(layers or self.decoder.stored_layers, self.decoder.stored_layers)
        self.before = len(self.lead_in)
        self.cache = self.decoder.new_cache(self.before + 512)
        self.cache.set_length(self.before)
        rows = QueryRows.of(torch.arange(self.before), self.decoder.device)
        self.decoder.fill_cache(self.lead_in.ids, rows, self.cache)
        self.scale = 0.0

    def moved(self, sides: Sequence[torch.Tensor], tables: Sequence[Any]) -> torch.Tensor:
        """Rotate each layer's `[heads, rows, head_dim]` by the tables in turn."""
        for table in tables:
            sides = [self.rotary.rotate(side[None].float(), table, layer)[0] for layer, side in enumerate(sides)]
        return torch.stack([*sides])

    def queries(self, question: str) -> torch.Tensor:
        """The queries of a question's words at their places, `[layers, heads, tokens, head_dim]`."""
        ids = question_tokens(self.tokenizer, question, self.parts)
        found: dict[int, torch.Tensor] = {}

        def watch(layer: int, query: torch.Tensor, key: torch.Tensor, params: Any) -> None:
            found[layer], self.scale = query[0].clone(), params.scale
            if layer == self.layers - 1:
                raise ForwardEnded

        places = torch.arange(self.before, self.before + len(ids))
        self.cache.set_length(self.before + len(ids))
        rows = replace(QueryRows.of(places, self.decoder.device), watch=watch)
        with suppress(ForwardEnded):
            self.decoder.fill_cache(ids, rows, self.cache)
        tables = self.rotary.table(places).inverse(), self.rotary.table(torch.arange(AT, AT + len(ids)))
        return self.moved([found[layer] for layer in range(self.layers)], tables)[
            :, :, ASKS : -len(self.parts.answer_header)
        ]

    def keys(self, chunks: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """The keys of chunks that end right before the question, `[layers, kv_heads, tokens, head_dim]` each."""
        kvs = prefill_chunks(self.decoder, self.lead_in, [PrefillItem(ids) for ids in chunks], self.layers)
        return [self.moved(kv.keys, [self.rotary.table(torch.arange(AT - kv.tokens, AT))]) for kv in kvs]

    def best_and_sum(self, queries: torch.Tensor, keys: torch.Tensor) -> Array:
        """Each head's largest score, and its logarithm of summed exponentials: `[2, layers · heads, rows]`."""
        layers, heads, rows, width = queries.shape
        grouped = queries.reshape(layers, keys.shape[1], -1, width)
        scores = (grouped @ keys.transpose(2, 3)).mul_(self.scale).view(layers * heads, rows, -1)
        return torch.stack([scores.amax(-1), scores.logsumexp(-1)]).numpy()


def share(scores: Array) -> Array:
    """The candidates' shares `[candidates, heads]`, mean over tokens, of `[candidates, heads, tokens]`."""
    weights = np.exp(scores - scores.max(0))
    return np.asarray((weights / weights.sum(0)).mean(-1))


@torch.inference_mode()
def look(given: argparse.Namespace) -> None:
    found_for = from_store(given) if given.format == "store" else from_set(given)
    asked = [one for one in found_for if one.texts]
    reader = Reader(given.model, given.layers)
    queries = [reader.queries(one.question) for one in (*asked, Asked("N/A", [], [], [], np.array([]), {}))]
    texts = list(dict.fromkeys(text for one in asked for text in one.texts))
    ids = dict(zip(texts, chunk_tokens(reader.tokenizer, texts), strict=True))
    found: dict[tuple[int, str], list[Array]] = {}
    left = sorted(texts, key=lambda text: len(ids[text]))
    while left:
        batch = [left.pop()]
        while left and sum(len(ids[text]) for text in (*batch, left[-1])) <= BATCH:
            batch.append(left.pop())
        for text, keys in zip(batch, reader.keys([ids[text] for text in batch]), strict=True):
            for number in (n for n, one in enumerate(asked) if text in one.texts):
                found[number, text] = [reader.best_and_sum(queries[at], keys) for at in (number, -1)]
        print(f"{len(left)} chunks left", file=sys.stderr)
    for number, one in enumerate(asked):
        pairs = [found[number, text] for text in one.texts]
        own, none = (np.stack([pair[side] for pair in pairs], 1) for side in (0, 1))
        for way, calibrated in WAYS:
            at = ("max", "sum").index(way)
            shares = share(own[at]) - (share(none[at]) if calibrated else 0)
            one.heads[way, calibrated] = (shares - shares.mean(0)) / (shares.std(0) + 1e-6)
    torch.save({"heads": queries[0].shape[1], "asked": [vars(one) for one in asked]}, given.out)
    print(f"{len(texts):,} chunks of {sum(map(len, ids.values())):,} tokens, {len(asked)} questions")


# --- judge


def apart(heads: Array, one: Asked) -> Array:
    """How often each head scores a gold candidate above another one."""
    gold = np.array([bool(name) for name in one.golds])
    return np.asarray((heads[gold][:, None] > heads[~gold][None]).mean((0, 1)))


def chosen(asked: Sequence[Asked]) -> tuple[tuple[str, bool], Array, float]:
    """The way, heads and weight that serve these questions best."""
    told = [one for one in asked if any(one.golds) and not all(one.golds)]
    tried = []
    for way in WAYS:
        order = np.argsort(-np.mean([apart(one.heads[way], one) for one in told], 0))
        for most in HEADS:
            some = order[:most]
            worth = np.mean([apart(one.heads[way][:, some].mean(1, keepdims=True), one) for one in told])
            tried.append((float(worth), way, some))
    _, way, some = max(tried, key=lambda one: one[0])
    weight = max(WEIGHTS, key=lambda w: sum(sum(one.score(both(way, some, w)(one))) for one in asked))
    return way, some, weight


def both(way: tuple[str, bool], heads: Array, weight: float) -> Scored:
    return lambda one: one.words / one.words.max() + weight * one.heads[way][:, heads].mean(1)


def alone(way: tuple[str, bool], heads: Array) -> Scored:
    return lambda one: one.heads[way][:, heads].mean(1)


def report(name: str, asked: Sequence[Asked], pairs: Sequence[tuple[Scored, Scored]]) -> None:
    """Print a row of Markdown for each of words, only heads, and both."""
    base = np.array([one.score(one.words) for one in asked])
    print(f"| {name} | words and hop | {base[:, 0].mean():.3f} | | {base[:, 1].mean():.3f} | |")
    for label, way in (("only heads", 0), ("both", 1)):
        own = np.array([one.score(scored[way](one)) for one, scored in zip(asked, pairs, strict=True)])
        cells = []
        for side in (0, 1):
            gain = (own - base)[:, side]
            low, high = interval(gain.tolist()) or (0.0, 0.0)
            cells.append(f"{own[:, side].mean():.3f} | {gain.mean():+.3f} [{low:+.3f}, {high:+.3f}]")
        print(f"| {name} | {label} | {' | '.join(cells)} |")


def asked_in(paths: Sequence[Path], layers: int | None) -> dict[str, list[Asked]]:
    """The questions of files by set, with the heads of the first so many layers."""
    sets = {}
    for path in paths:
        saved = torch.load(path, weights_only=False)
        heads = None if layers is None else layers * saved["heads"]
        sets[path.stem] = [Asked(**row) for row in saved["asked"]]
        for one in sets[path.stem]:
            one.heads = {way: scores[:, :heads] for way, scores in one.heads.items()}
    return sets


def judge(given: argparse.Namespace) -> None:
    sets, fixed = asked_in(given.files, given.layers), asked_in(given.chosen_on, given.layers)
    print("| set | ranked by | MRR | gain | recall@5 | gain |\n| --- | --- | --- | --- | --- | --- |")
    for name, asked in sets.items():
        pairs: list[tuple[Scored, Scored]] = [(lambda one: one.words,) * 2] * len(asked)
        for half in (0, 1) if not fixed else ():
            pairs[half::2] = [ranking(name, asked[1 - half :: 2])] * len(asked[half::2])
        if not fixed:
            report(f"{name}, two halves", asked, pairs)
        others = [one for other, more in (fixed or sets).items() if fixed or other != name for one in more]
        if others:
            report(f"{name}, heads of other questions", asked, [ranking(name, others)] * len(asked))


def ranking(name: str, asked: Sequence[Asked]) -> tuple[Scored, Scored]:
    """Rankings by the heads that serve these questions best, alone and with the words."""
    way, some, weight = chosen(asked)
    print(f"{name}: {way}, heads {some.tolist()}, weight {weight}", file=sys.stderr)
    return alone(way, some), both(way, some, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    looking = commands.add_parser("look")
    looking.add_argument("format", choices=(*READERS, "store"))
    looking.add_argument("input", type=Path)
    looking.add_argument("out", type=Path)
    looking.add_argument("--model", default="smollm2")
    looking.add_argument("--first", type=int, default=0, help="questions to pass over")
    looking.add_argument("--questions", type=int, default=60)
    looking.add_argument("--candidates", type=int, default=20)
    looking.add_argument("--layers", type=int, help="only the first so many")
    looking.add_argument("--store", type=Path)
    looking.set_defaults(run=look)
    judging = commands.add_parser("judge")
    judging.add_argument("files", type=Path, nargs="+")
    judging.add_argument("--chosen-on", type=Path, nargs="+", default=[], help="files whose questions choose the heads")
    judging.add_argument("--layers", type=int, help="only heads of the first so many")
    judging.set_defaults(run=judge)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
