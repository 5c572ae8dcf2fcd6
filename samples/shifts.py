"""What shifted reuse is worth, beside controls: no shift, random ones of equal size, and the true mean.

    python samples/shifts.py STORE BATCH.jsonl [--ratio 0.15 0.05] [--kinds ...] [--limit N] [--resume FILE.jsonl]

answers every question in full and in `union`, each kind of shift in turn, and prints the KL of the answer in nats:
mean with its 95 % interval, median, and the paired difference to the product's own shift (bootstrap over questions).

    none          nothing is shifted
    product       what `kvtool query` does
    random        each chunk's offset in a random direction, head by head as long as the product's
    true          the mean change that the chunk's reused rows would really need: what better probes could give at most
    keys, values  the product's, of one side alone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec.base import LayerKV
from kvtool.core.evaluate.reference import Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.fusion.shift import Probes, Shift, rows_of
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.query.layout import Asked, lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import read_batch
from kvtool.core.session.session import Session

Estimate = Callable[[Shift, int, Probes, LayerKV], LayerKV]
PRODUCT = Shift.offsets
RESAMPLES = 10_000


def random_offsets(shift: Shift, layer: int, probes: Probes, changes: LayerKV) -> LayerKV:
    """Directions that follow from the layer, so that a run can be repeated."""
    draw = torch.Generator().manual_seed(layer)

    def turned(offsets: torch.Tensor) -> torch.Tensor:
        other = torch.randn(offsets.shape, generator=draw)
        return other / other.norm(dim=2, keepdim=True) * offsets.norm(dim=2, keepdim=True)

    keys, values = PRODUCT(shift, layer, probes, changes)
    return turned(keys), turned(values)


def true_offsets(full: PromptCache) -> Estimate:
    """The offsets that bring a chunk's reused rows nearest to full prefill's, each row weighted by its factor."""

    def offsets(shift: Shift, layer: int, probes: Probes, changes: LayerKV) -> LayerKV:
        where, chunks = probes.others
        share = probes.factors[where][:, None]
        size = torch.zeros(len(probes.spans), 1).index_add_(0, chunks, share.square())
        keys, values = (
            torch.zeros(side.shape[0], len(size), side.shape[2]).index_add_(1, chunks, side * share) / size
            for side in needed(shift, layer, where, full)
        )
        return keys, values

    return offsets


def needed(shift: Shift, layer: int, where: torch.Tensor, full: PromptCache) -> LayerKV:
    """What reused rows lack, float32 `[kv_heads, rows, head_dim]`, keys un-rotated."""
    rotary, positions = shift.decoder.rotary, shift.plan.positions[where]
    pairs = zip(rows_of(full.buffers[layer], where), rows_of(shift.cache.buffers[layer], where), strict=True)
    keys, values = (right.float() - now.float() for right, now in pairs)
    return rotary.rotate(keys[None], rotary.table(positions).inverse(), layer)[0], values


def one_side(side: int) -> Estimate:
    def offsets(shift: Shift, layer: int, probes: Probes, changes: LayerKV) -> LayerKV:
        both = list(PRODUCT(shift, layer, probes, changes))
        both[1 - side] = torch.zeros_like(both[1 - side])
        return both[0], both[1]

    return offsets


KINDS = ("none", "product", "random", "true", "keys", "values")


def kind_of(name: str, full: PromptCache) -> Estimate:
    """The estimate that a kind takes the product's place with."""
    known = {"random": random_offsets, "true": true_offsets(full), "keys": one_side(0), "values": one_side(1)}
    return known.get(name, PRODUCT)


def main() -> None:
    options = arguments()
    asking = QueryOptions(max_tokens=options.max_tokens)
    session = Session(Store.open(options.store), ModelOptions(), warn=print)
    done = read_journal(options.resume)
    wanted = [(ratio, kind) for ratio in options.ratio for kind in options.kinds]
    for number, request in enumerate(read_batch(options.batch)[: options.limit]):
        left = [one for one in wanted if (number, *one) not in done]
        if not left:
            continue
        for (ratio, kind), (answer, first) in distances(session, lay_out(session, request, asking), asking, left):
            done[number, ratio, kind] = answer, first
            if options.resume is not None:
                with options.resume.open("a") as journal:
                    journal.write(json.dumps([number, ratio, kind, answer, first]) + "\n")
    show(done, options.ratio, options.kinds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("batch", type=Path, help="questions, as for `kvtool query --batch`")
    parser.add_argument("--ratio", type=float, nargs="+", default=(0.15, 0.05))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--limit", type=int, help="how many questions")
    parser.add_argument("--max-tokens", type=int, default=20, help="of an answer (default 20)")
    parser.add_argument("--resume", type=Path, help="keep results here and go on from them")
    return parser.parse_args()


def read_journal(path: Path | None) -> dict[tuple[int, float, str], tuple[float, float]]:
    if path is None or not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {(number, ratio, kind): (answer, first) for number, ratio, kind, answer, first in rows}


def distances(
    session: Session, asked: Asked, options: QueryOptions, left: list[tuple[float, str]]
) -> Iterator[tuple[tuple[float, str], tuple[float, float]]]:
    """KL of the answer and of its first token, for each ratio and kind."""

    def fused(selector: Any) -> Fused:
        return fuse(session.decoder, asked.plan, selector, session.source, reserve=options.max_tokens)

    full = fused(Full())
    reference = Reference.answered(session.decoder, full, options.max_tokens)
    for ratio, kind in left:
        Shift.offsets = kind_of(kind, full.cache)  # type: ignore[method-assign,assignment]
        try:
            distance = reference.force(fused(Union(ratio=ratio, shift=kind != "none"))).distance
        finally:
            Shift.offsets = PRODUCT  # type: ignore[method-assign]
        yield (ratio, kind), (distance.kl_answer, distance.kl_first)


def show(done: dict[tuple[int, float, str], tuple[float, float]], ratios: list[float], kinds: list[str]) -> None:
    """A table: only questions that every kind has answered."""
    numbers = sorted({number for number, *_ in done})
    whole = [n for n in numbers if all((n, ratio, kind) in done for ratio in ratios for kind in kinds)]
    print(f"{len(whole)} questions\n\n| ratio | shift | KL answer | median | KL first | less the product's |")
    print("| --- | --- | --- | --- | --- | --- |")
    draws = torch.randint(len(whole), (RESAMPLES, len(whole)), generator=torch.Generator().manual_seed(0))
    for ratio in ratios:
        columns = {kind: torch.tensor([done[n, ratio, kind] for n in whole]) for kind in kinds}
        for kind, column in columns.items():
            answer = column[:, 0]
            gap = with_interval(answer - columns["product"][:, 0], draws) if "product" in columns else "-"
            cells = (f"{ratio:.0%}", kind, with_interval(answer, draws), f"{answer.median():.4f}")
            print(f"| {' | '.join(cells)} | {column[:, 1].mean():.4f} | {gap} |")


def with_interval(values: torch.Tensor, draws: torch.Tensor) -> str:
    """The mean, and its 95 % interval over resampled questions."""
    low, high = values[draws].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return f"{values.mean():.4f} [{low:.4f}, {high:.4f}]"


if __name__ == "__main__":
    main()
