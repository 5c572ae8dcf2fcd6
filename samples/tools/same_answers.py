"""Save what a machine answers, with the logits of each first token, and compare two machines.

python samples/tools/same_answers.py save FILE --store STORE
python samples/tools/same_answers.py compare FILE OTHER
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

import kvtool

MODES = ("full", "union", "epic", "reuse")
CORPUS = Path(__file__).parents[1] / "corpus"
DOCUMENTS = ("people/ilse-varnholt.md", "people/tobias-crennick.md")
QUESTION = "Who is Ilse Varnholt?"
SYSTEM = "Answer from the given passages in a few words."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    saving = commands.add_parser("save")
    saving.add_argument("file", type=Path)
    saving.add_argument("--store", type=Path, required=True, help="made anew")
    saving.add_argument("--words", type=int, default=40, help="of each document; an emulated machine is slow")
    saving.add_argument("--max-tokens", type=int, default=8)
    saving.set_defaults(run=save)
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("other", type=Path)
    comparing.set_defaults(run=compare)
    options = parser.parse_args()
    options.run(options)


def save(options: argparse.Namespace) -> None:
    """Ingest the beginnings of documents, ask in each mode, and write answers and logits to a file."""
    folder = options.store.with_suffix(".documents")
    folder.mkdir(parents=True, exist_ok=True)
    for path in DOCUMENTS:
        words = (CORPUS / path).read_text(encoding="utf-8").split(" ")[: options.words]
        (folder / Path(path).name).write_text(" ".join(words), encoding="utf-8")
    logits, answers = dict[str, np.ndarray](), []
    with kvtool.open(options.store, "smollm2", dtype="float32") as cache:
        started = time.perf_counter()
        cache.ingest(folder, system=SYSTEM)
        tell(started, "ingest")
        for mode in MODES:
            started = time.perf_counter()
            reply = cache.query(QUESTION, fusion=mode, max_tokens=options.max_tokens, explain=True, force=True)
            logits[mode] = reply.fused.logits.float().numpy()
            answers.append({"mode": mode, "answer": reply.answer, "ids": list(reply.generated.ids)})
            answers[-1] |= {"tokens": reply.tokens, "resolved": reply.resolved}
            about = {"machine": platform.machine(), "torch": torch.__version__, "answers": answers}
            np.savez_compressed(options.file, about=np.array(json.dumps(about, default=str)), **logits)
            tell(started, f"{mode}: {reply.answer!r} {reply.resolved}")


def tell(started: float, what: str) -> None:
    """Say what is done, and how long it took."""
    print(f"{time.perf_counter() - started:.1f} s {what}", file=sys.stderr, flush=True)


def compare(options: argparse.Namespace) -> None:
    """Print one row a mode: whether the text is the same, and how far the logits are from each other."""
    one, other = (dict(np.load(path, allow_pickle=False)) for path in (options.file, options.other))
    said = [{row["mode"]: row for row in json.loads(str(side["about"]))["answers"]} for side in (one, other)]
    print("| mode | prompt | recomputed | answer | same text | largest logit | largest difference | KL, nats |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for mode, row in said[0].items():
        left, right = (side[mode].astype(np.float64) for side in (one, other))
        same = "yes" if row["ids"] == said[1][mode]["ids"] else "no"
        figures = f"{np.abs(left).max():.1f} | {np.abs(left - right).max():.1e} | {divergence(left, right):.1e}"
        counts = f"{row['tokens']['prompt']} | {row['tokens']['recomputed']}"
        print(f"| {mode} | {counts} | {row['answer']} | {same} | {figures} |")


def divergence(left: np.ndarray, right: np.ndarray) -> float:
    """Return KL(left ‖ right) of the next token, in nats."""
    p, q = (side - side.max() - np.log(np.exp(side - side.max()).sum()) for side in (left, right))
    return float((np.exp(p) * (p - q)).sum())


if __name__ == "__main__":
    main()
