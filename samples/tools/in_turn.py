"""Ask two checkouts of kvtool the same questions in turn: how long each took, and whether they answer the same.

python samples/tools/in_turn.py BEFORE AFTER --store STORE [--rounds 15]

Each checkout has a process of its own with the store open. A question is asked in the first, then in the second, in
reversed order every other round, so that a disturbance of seconds hits both. Both get the same chunks by their ids,
since what they find may differ. A ratio below 1 says that AFTER is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

MODES = ("full", "union", "epic", "reuse")
COUNTS = (4, 16)  # chunks; full prefill of the longer prompt takes too long
TOKENS = 16  # of each answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    from same_answers import divergence  # here: it imports kvtool, which a checkout's own process must not have yet

    lines = (Path(__file__).parents[1] / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    ids = chunk_ids(options.after, options.store)
    sides = [Checkout(tree, options.store) for tree in (options.before, options.after)]
    times: dict[str, list[tuple[float, float]]] = {}
    same: dict[str, list[bool]] = {mode: [] for mode in MODES}
    apart: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(-1, options.rounds):  # the round before the first compiles and warms up
        for mode in MODES:
            for count in COUNTS[:1] if mode == "full" else COUNTS:
                chosen = [ids[(7 * turn + at) % len(ids)] for at in range(count)]
                task = {"question": questions[turn], "mode": mode, "chunks": chosen}
                pair = [side.ask(task) for side in (sides, sides[::-1])[turn % 2]][:: (1, -1)[turn % 2]]
                if turn < 0:
                    continue
                for what in ("first token", "a later token", "processor"):
                    times.setdefault(f"{what}, {mode}, {count} chunks", []).append((pair[0][what], pair[1][what]))
                same[mode].append(pair[0]["ids"] == pair[1]["ids"])
                apart[mode].append(divergence(*(np.array(one["logits"]) for one in pair)))
    print(f"{'what':34} {'before':>9} {'after':>9}  ratio [quartiles]")
    for row, pairs in sorted(times.items()):
        before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([after / before for before, after in pairs], n=4)
        print(f"{row:34} {before:7.1f} ms {after:6.1f} ms  {middle:.3f} [{low:.3f}, {high:.3f}]")
    for mode in MODES:
        equal = f"{sum(same[mode])} of {len(same[mode])} answers equal"
        print(f"{mode}: {equal}, KL of the first token at most {max(apart[mode]):.1e} nats")


def chunk_ids(tree: Path, store: Path) -> list[str]:
    """Return the ids of all chunks of a store, sorted."""
    command = [sys.executable, "-m", "kvtool", "store", "ls", "--chunks", "--json", "--store", str(store)]
    listed = subprocess.run(command, env=environment(tree), check=True, capture_output=True).stdout
    return sorted({chunk["id"] for document in json.loads(listed)["documents"] for chunk in document["chunks"]})


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree.resolve())}


class Checkout:
    """A process that answers with the code of one checkout."""

    def __init__(self, tree: Path, store: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--answer", str(store)],
            env=environment(tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return times in milliseconds, the answer's token ids, and the logits of its first token."""
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(task), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def answer(store: str) -> None:
    """Answer what comes on stdin."""
    import kvtool

    with kvtool.open(store) as cache:
        for line in sys.stdin:
            task = json.loads(line)
            began = time.process_time()
            reply = cache.query(task["question"], chunks=task["chunks"], fusion=task["mode"], max_tokens=TOKENS)
            spent = (time.process_time() - began) * 1e3
            found = {"first token": reply.timing_ms["ttft"], "processor": spent, "ids": reply.generated.ids}
            found["a later token"] = reply.generated.milliseconds / max(reply.generated.steps, 1)
            found["logits"] = reply.fused.logits.float().flatten().tolist()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2])
    else:
        main()
