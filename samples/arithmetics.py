"""One store, two arithmetics: what records that another machine made lose, and what each store costs to ask.

    python samples/arithmetics.py FOLDER [--model smollm2] [--documents N] [--questions N] [--rounds N]

makes three stores of the same documents in FOLDER (what is there already is kept): 16 bits a number computed in
bfloat16, 16 bits computed in float32, and 32 bits computed in float32. Then each arithmetic asks its own store, the
other's, and (float32) the one of 32 bits, with `reuse` and with `union`. A machine without bfloat16 is stood for by
`--dtype float32`, which is what it would choose.

Printed for each pair, over all questions: KL divergence (nats) of the first token's distribution from that of the
same arithmetic over the records of its own, how many answers of 16 tokens are the same, and the median time to the
first token; the stores are asked in turns, so that what else runs on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F

import kvtool
from kvtool.core.model.options import EARLIER_SYSTEM

SAMPLES = Path(__file__).resolve().parent
STORES = {  # name: what computed it, what it keeps
    "16 bits by bfloat16": ("bfloat16", "bfloat16"),
    "16 bits by float32": ("float32", "bfloat16"),
    "32 bits by float32": ("float32", "float32"),
}
OWN = {"bfloat16": "16 bits by bfloat16", "float32": "32 bits by float32"}
MODES = ("reuse", "union")
TOKENS = 16


def chosen(documents: int, questions: int) -> tuple[list[Path], list[str]]:
    """The documents that the first questions are about, as many as wanted, and the questions that these answer."""
    with (SAMPLES / "questions.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    sources: dict[str, None] = {}
    for row in rows:
        needed = row.get("sources", [row["source"]])
        if len({*sources, *needed}) <= documents:
            sources |= dict.fromkeys(needed)
    answered = [row["question"] for row in rows if {*row.get("sources", [row["source"]])} <= {*sources}]
    return [SAMPLES / "corpus" / source for source in sources], answered[:questions]


def ask(caches: dict[str, kvtool.Cache], question: str, mode: str) -> dict[str, tuple[torch.Tensor, str, float]]:
    """Of each store: log-probabilities of the first token, the answer, milliseconds to the first token."""
    found = {}
    for name, cache in caches.items():
        reply = cache.query(question, fusion=mode, max_tokens=TOKENS)
        found[name] = (reply.fused.logits.double().log_softmax(-1), reply.answer, reply.timing_ms["ttft"])
    return found


def asked(folder: Path, model: str, arithmetic: str, questions: list[str], rounds: int) -> list[dict[str, Any]]:
    """What one arithmetic finds in each store."""
    names = [name for name, (_, kept) in STORES.items() if kept == "bfloat16" or arithmetic == "float32"]
    caches = {name: kvtool.open(folder / name.replace(" ", "-"), model=model, dtype=arithmetic) for name in names}
    rows = []
    try:
        for mode in MODES:
            ask(caches, questions[0], mode)  # loads, and compiles what has to be compiled
            found = [[ask(caches, question, mode) for _ in range(rounds)] for question in questions]
            for name in names:
                own = [one[0][OWN[arithmetic]] for one in found]
                here = [one[0][name] for one in found]
                kl = [
                    float(F.kl_div(b[0], a[0], reduction="sum", log_target=True))
                    for a, b in zip(own, here, strict=True)
                ]
                same = sum(a[1] == b[1] for a, b in zip(own, here, strict=True))
                ttft = median(one[name][2] for turns in found for one in turns)
                rows.append(
                    {
                        "computes": arithmetic,
                        "store": name,
                        "mode": mode,
                        "kl_mean": mean(kl),
                        "kl_worst": max(kl),
                        "same_answers": f"{same} of {len(questions)}",
                        "ttft_ms": ttft,
                    }
                )
    finally:
        for cache in caches.values():
            cache.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=12, metavar="N")
    parser.add_argument("--questions", type=int, default=24, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    given = parser.parse_args()
    paths, questions = chosen(given.documents, given.questions)
    for name, (computed, kept) in STORES.items():
        with kvtool.open(given.folder / name.replace(" ", "-"), model=given.model, dtype=computed) as cache:
            report = cache.ingest(paths, store_dtype=kept, system=EARLIER_SYSTEM)
            print(f"{name}: {report.chunks.computed} chunks computed, {report.kv_bytes / 1e6:.1f} MB of KV", flush=True)
    print(f"\n{given.model}, {len(paths)} documents, {len(questions)} questions, {given.rounds} rounds\n")
    print("| computes in | store | mode | KL, mean | KL, worst | same answers | TTFT, ms |\n" + "| --- " * 7 + "|")
    for arithmetic in ("bfloat16", "float32"):
        for row in asked(given.folder, given.model, arithmetic, questions, given.rounds):
            numbers = f"{row['kl_mean']:.1e} | {row['kl_worst']:.1e} | {row['same_answers']} | {row['ttft_ms']:.0f}"
            print(f"| {row['computes']} | {row['store']} | {row['mode']} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
