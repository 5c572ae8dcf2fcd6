"""Fit something to a model on one set's questions, distilling full prefill, and judge it on sets it never saw.

    python samples/fitted.py draw SQUAD.json CORPUS OUT.jsonl [--prompts 160] [--questions 4]
    python samples/fitted.py {writer|reader|offset|scale} STORE BATCH.jsonl --held STORE BATCH.jsonl [--held …]
    python samples/fitted.py ingest KEPT.pt …

`draw` makes prompts of a set in SQuAD's format whose paragraphs `samples/eval.py squad` has written to CORPUS: some
paragraphs of one article, some of others, and questions on them. The others fit on the prompts of one store and print
the KL of the answers (nats, greedy answers of full prefill, no gold ones) before and after on the prompts of others.
`ingest` is `kvtool ingest` with a writer or an offset that `--out KEPT.pt` has kept, to be measured by `inspect
quality`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from eval import READERS, load
from fitting.compiled import ingest
from fitting.kinds import KINDS
from fitting.prompts import Sets
from fitting.training import table, train

FEWEST, MOST, OF_ONE = 3, 8, 5  # paragraphs of a prompt; at most so many of one article


def main() -> None:
    options = arguments()
    options.run(options)


def draw(options: argparse.Namespace) -> None:
    """Write a batch file of prompts, the same for the same input."""
    articles: dict[str, dict[str, list[str]]] = {}
    for example in READERS["squad"](load(options.input)):
        paragraph = example.paragraphs[0]
        if (options.corpus / paragraph.file_name).exists():
            articles.setdefault(paragraph.title, {}).setdefault(paragraph.file_name, []).append(example.question)
    with options.out.open("w", encoding="utf-8") as out:
        for number in range(options.prompts):
            lot = random.Random(number)
            drawn = _paragraphs(lot, [list(one.items()) for one in articles.values()])
            questions = [question for _, asked in drawn for question in asked]
            for question in lot.sample(questions, min(options.questions, len(questions))):
                out.write(json.dumps({"question": question, "documents": [name for name, _ in drawn]}) + "\n")


def _paragraphs(lot: random.Random, articles: list[list[Any]]) -> list[Any]:
    first = lot.choice(articles)
    drawn = dict(lot.sample(first, min(len(first), lot.randint(1, OF_ONE))))
    wanted = lot.randint(max(FEWEST, len(drawn)), MOST)
    while len(drawn) < wanted:
        drawn |= [lot.choice(lot.choice(articles))]
    return lot.sample(list(drawn.items()), len(drawn))


def fit(options: argparse.Namespace) -> None:
    """Fit, judge, print, and save what was fitted where that is asked for."""
    torch.manual_seed(0)
    sets = Sets()
    prompts = sets.read(options.store, options.batch, options.prompts, options.max_tokens)
    held = {
        batch.parent.name: sets.read(store, batch, options.limit, options.max_tokens) for store, batch in options.held
    }
    decoder = prompts[0].decoder
    kind = KINDS[options.kind](decoder, options.rank, prompts[0].session.identity.lead_in.ids)
    mine = sum(parameter.numel() for parameter in kind.parameters)
    share = mine / sum(parameter.numel() for parameter in decoder.model.parameters())
    print(f"{options.kind}: {mine:,} parameters, {share:.2%} of the model's; {len(prompts)} prompts", flush=True)
    train(kind, prompts, options.steps, options.rate)
    table(kind, held)
    if options.out is not None:
        torch.save([parameter.detach() for parameter in kind.parameters], options.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="kind", required=True)
    drawing = tasks.add_parser("draw")
    drawing.add_argument("input", type=Path)
    drawing.add_argument("corpus", type=Path)
    drawing.add_argument("out", type=Path)
    drawing.add_argument("--prompts", type=int, default=160)
    drawing.add_argument("--questions", type=int, default=4)
    drawing.set_defaults(run=draw)
    storing = tasks.add_parser("ingest", add_help=False)
    storing.add_argument("kept", type=Path)
    storing.set_defaults(run=lambda options: ingest(options.kept, options.rest))
    for kind in KINDS:
        fitting = tasks.add_parser(kind)
        fitting.add_argument("store", type=Path)
        fitting.add_argument("batch", type=Path, help="the prompts to learn from, all of one store")
        fitting.add_argument(
            "--held", nargs=2, type=Path, action="append", metavar=("STORE", "BATCH.jsonl"), default=[]
        )
        fitting.add_argument("--prompts", type=int, help="learn from so many (default all)")
        fitting.add_argument("--limit", type=int, help="judge on so many prompts a set (default all)")
        fitting.add_argument("--steps", type=int, default=120)
        fitting.add_argument("--rank", type=int, default=8)
        fitting.add_argument("--rate", type=float, default=5e-4)
        fitting.add_argument("--max-tokens", type=int, default=16, help="of an answer (default 16)")
        fitting.add_argument("--out", type=Path)
        fitting.set_defaults(run=fit)
    options, rest = parser.parse_known_args()
    if rest and options.kind != "ingest":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options


if __name__ == "__main__":
    main()
