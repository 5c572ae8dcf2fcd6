"""Whether a prompt says what share of its rows has to be recomputed.

    python samples/tools/ratios.py look STORE BATCH.jsonl OUT.jsonl [--limit N]
    python samples/tools/ratios.py judge OUT.jsonl …

`look` answers each question in full and by `union` at several ratios, and keeps the KL of the answer next to what is
known without the full answer: the prompt, the weight of the rows that the question's attention and the stored
sensitivities name, and how far and how alike the recomputed rows changed. A second `look` goes on where the first
stopped.

`judge` predicts the KL at each ratio from that, fitted on one half of the questions, and gives each question of the
other half a ratio, so that the mean is 15 %: the ratio whose next step would win least per row. Beside it: 15 % for
all, and the best that knowing the KL could do. Intervals are paired, 95 % of 10,000 resamples over questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.evaluate.reference import Reference, kl_of_logits
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import read_batch
from kvtool.core.session.session import Session
from kvtool.reports.intervals import interval

RATIOS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.4)
FIXED = RATIOS.index(0.15)
BEFORE = ("tokens", "chunks", "alike", "mass", "peak", *(f"left_{ratio}" for ratio in RATIOS))
DURING = ("size", "common", "entropy", "margin", "moved")  # of the pass at 5 % (`moved`: between 2 and 5 %)
# `steps`: how far the first token's distribution moved from each ratio to the next, up to 15 %
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Watched(Union):
    """The mode `union`, with the worth that it ranks by kept for whoever asks."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def weighed(self, plan: Plan, attention: torch.Tensor) -> torch.Tensor:
        worth = Union.weighed(self, plan, attention)
        self.seen.append(worth[plan.hit_rows()])
        return worth


# ---- look


def look(given: argparse.Namespace) -> None:
    done = len(given.out.read_text().splitlines()) if given.out.exists() else 0
    with Store.open(given.store) as store, given.out.open("a") as out:
        session = Session.open(store, ModelOptions())
        for at, request in enumerate(read_batch(given.batch)[: given.limit][done:], done):
            row = {"question": request.question, **measured(session, lay_out(session, request, OPTIONS).plan)}
            print(json.dumps(row), file=out, flush=True)
            print(f"{at + 1}: {row['kl']}", file=sys.stderr)


OPTIONS = QueryOptions(max_tokens=20, level="raw")


def measured(session: Session, plan: Plan) -> dict[str, Any]:
    """Return the KL at each ratio, and what is known of the prompt before and during the passes."""
    decoder, source = session.decoder, session.source
    reference = Reference.answered(decoder, fuse(decoder, plan, Full(), source, reserve=20), 20)
    row: dict[str, Any] = {"kl": [], "rows": []}
    heads: list[torch.Tensor] = []
    for ratio in RATIOS:
        mode = Watched(ratio)
        fused = fuse(decoder, plan, mode, source, reserve=20)
        heads.append(fused.logits.clone())
        if not row["kl"]:
            row["before"] = [float(value) for value in before(plan, mode.seen[0])]
        if ratio == RATIOS[1]:
            row["during"] = [float(value) for value in during(fused, heads)]
        row["rows"].append(fused.tokens.recomputed / (fused.tokens.recomputed + fused.tokens.reused))
        row["kl"].append(reference.force(fused).distance.kl_answer)
    steps = kl_of_logits(torch.stack(heads[1:]), torch.stack(heads[:-1])).clamp_min(1e-6).log()
    return row | {"steps": steps[:FIXED].tolist()}


def before(plan: Plan, worth: torch.Tensor) -> Sequence[float]:
    """Return the numbers `BEFORE`."""
    chunks = [set(chunk.ids) for chunk in plan.cached_chunks]
    pairs = [len(a & b) / len(a | b) for at, a in enumerate(chunks) for b in chunks[:at]]
    ranked, total = worth.sort(descending=True).values, worth.sum()
    left = [1 - ranked[: round(ratio * len(ranked))].sum() / total for ratio in RATIOS]
    return [np.log(plan.length), len(chunks), np.mean(pairs or [0]), total.log(), (ranked[0] / total).log(), *left]


def during(fused: Fused, heads: Sequence[torch.Tensor]) -> Sequence[float]:
    """Return the numbers `DURING`."""
    shares = heads[-1].double().softmax(-1)
    first, second = shares.topk(2).values
    moved = kl_of_logits(heads[-1][None], heads[-2][None])[0]
    entropy = -(shares * shares.clamp_min(1e-30).log()).sum()
    return [fused.shifted.size, fused.shifted.common, entropy, (first / second).log(), moved.clamp_min(1e-6).log()]


# ---- judge


def judge(given: argparse.Namespace) -> None:
    for path in given.files:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kl = np.array([row["kl"] for row in rows])
        known = {
            name: np.array([row[name] for row in rows]) for name in ("before", "during", "steps") if name in rows[0]
        }
        known["all"] = np.hstack([*known.values()])
        print(f"{path.stem}: {len(rows)} questions; KL at " + ", ".join(map("{} {:.3f}".format, RATIOS, kl.mean(0))))
        show("with the KL known", allotted(kl), kl)
        for name, numbers in known.items():
            show(f"from what is known {name}", held_out(numbers, kl), kl)


def show(name: str, chosen: Array, kl: Array) -> None:
    """Print the mean KL of the chosen ratios, and its difference from 15 % for all."""
    own, fixed = kl[np.arange(len(kl)), chosen], kl[:, FIXED]
    low, high = interval(list(own - fixed)) or (0.0, 0.0)
    mean = np.mean(np.array(RATIOS)[chosen])
    print(f"  {name}: mean ratio {mean:.3f}, KL {own.mean():.4f}, less 15 % for all {(own - fixed).mean():+.4f} "
          f"[{low:+.4f}, {high:+.4f}]")  # fmt: skip


def allotted(kl: Array) -> Array:
    """Choose a ratio for each question so that the mean is 15 % at most and the sum of the KL least (by Lagrange)."""
    ratios = np.array(RATIOS)

    def at(price: float) -> Array:
        choice: Array = (kl + price * ratios).argmin(1)
        return choice

    low, high = 0.0, 1e3
    for _ in range(60):
        price = (low + high) / 2
        low, high = (price, high) if ratios[at(price)].mean() > RATIOS[FIXED] else (low, price)
    return at(high)


def held_out(numbers: Array, kl: Array) -> Array:
    """Choose each half's ratios by the other half's fit: ridge regression of log KL, as a step below the last."""
    chosen = np.zeros(len(kl), np.int64)
    half = np.arange(len(kl)) % 2 == 0
    for own in (half, ~half):
        chosen[own] = allotted(predictor(numbers[~own], kl[~own])(numbers[own]))
    return chosen


def predictor(numbers: Array, kl: Array) -> Callable[[Array], Array]:
    """Fit log KL at each ratio by ridge regression on standardised numbers; scale each ratio to its mean KL."""
    mean, spread = numbers.mean(0), numbers.std(0) + 1e-9
    target = np.log(kl + 1e-4)

    def design(values: Array) -> Array:
        return np.hstack([np.ones((len(values), 1)), (values - mean) / spread])

    rows = design(numbers)
    penalty = 0.1 * len(rows) * np.eye(rows.shape[1])
    penalty[0, 0] = 0
    weights = np.linalg.solve(rows.T @ rows + penalty, rows.T @ target)
    scale = kl.mean(0) / np.exp(rows @ weights).mean(0)
    return lambda values: np.exp(design(values) @ weights) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    looking = commands.add_parser("look")
    looking.add_argument("store", type=Path)
    looking.add_argument("batch", type=Path)
    looking.add_argument("out", type=Path)
    looking.add_argument("--limit", type=int)
    looking.set_defaults(run=look)
    judging = commands.add_parser("judge")
    judging.add_argument("files", type=Path, nargs="+")
    judging.set_defaults(run=judge)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
