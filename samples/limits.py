"""What is left between `union` with its shift and full prefill, by putting the truth back piece by piece.

    python samples/limits.py STORE BATCH.jsonl --resume FILE.jsonl [--gold FORMAT INPUT.json] [--ratio 0.15] [--limit N]
    python samples/limits.py STORE BATCH.jsonl --resume OTHER.jsonl --ideas [--ratio 0.15] [--limit N]

prints the KL of the answer in nats, mean with its 95 % interval and median, for each piece of full prefill's keys and
values that is put into the fused cache, for rows chosen by oracles and for oracle shifts; and what of it is whose by
integrated gradients. `--ideas`: other ways to spend the same number of recomputed rows instead.
`--gold` names the set that `samples/eval.py` made the batch of, which knows the passages that answer a question.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from eval import READERS, load
from restoring.case import Case
from restoring.ideas import tried
from restoring.measured import measured

from kvtool.core.cache.store import Store
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.layout import lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import read_batch
from kvtool.core.session.session import Session
from kvtool.lab.charts.svg import Line, Panel, line_charts
from kvtool.lab.measure.intervals import Interval, estimates, ratio
from kvtool.lab.measure.intervals import interval as interval_of


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    gold = gold_files(options.gold) if options.gold else {}
    ids = [json.loads(line).get("id") for line in options.batch.read_text(encoding="utf-8").splitlines()]
    asking = QueryOptions(max_tokens=options.max_tokens)
    session = Session(Store.open(options.store), ModelOptions(), warn=print)
    rows = read_journal(options.resume)
    done = {row["question"] for row in rows}
    for number, request in enumerate(read_batch(options.batch)[: options.limit]):
        if number in done:
            continue
        case = Case.of(session, lay_out(session, request, asking), options.max_tokens)
        if options.ideas:
            found, facts = dict(tried(case, options.ratio)), {}
        else:
            found, facts = measured(case, options.ratio, gold.get(ids[number], ()))
        rows.append({"question": number, "kl": found, "facts": facts})
        with options.resume.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(rows[-1]) + "\n")
    show(rows)
    if options.figure is not None:
        options.figure.write_text(figure(rows), encoding="utf-8", newline="\n")


def figure(rows: list[dict[str, Any]]) -> str:
    """Whose what is left is, layer by layer, as SVG; a layer that makes it less counts as nothing."""
    panels = []
    for title, which in (("reuse", "shares of reuse"), ("union with its shift", "shares")):
        facts = [row["facts"][which] for row in rows]
        whole = sum(one["total"] for one in facts)
        lines = []
        for side, name in enumerate(("keys", "values")):
            sums = [
                sum(one["layers"][layer][side] for one in facts) / whole for layer in range(len(facts[0]["layers"]))
            ]
            lines.append(Line(name, tuple((layer, max(part, 0.0)) for layer, part in enumerate(sums))))
        panels.append(Panel(f"share of the KL of {title}", tuple(lines)))
    return line_charts("Whose the distance from full prefill is", panels, "layer", f"{len(rows)} questions")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("batch", type=Path, help="questions, as for `kvtool query --batch`")
    parser.add_argument("--resume", type=Path, required=True, help="keep results here and go on from them")
    parser.add_argument("--gold", nargs=2, metavar=("FORMAT", "INPUT.json"), help="as for samples/eval.py")
    parser.add_argument("--ideas", action="store_true", help="try other choices of rows instead")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="draw the shares of layers")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--limit", type=int, help="how many questions")
    parser.add_argument("--max-tokens", type=int, default=20, help="of an answer (default 20)")
    return parser.parse_args()


def gold_files(named: tuple[str, str]) -> dict[str, set[str]]:
    """Of each question: the files of the passages that answer it."""
    examples = READERS[named[0]](load(Path(named[1])))
    return {one.id: {part.file_name for part in one.paragraphs if part.supporting} for one in examples}


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def show(rows: list[dict[str, Any]]) -> None:
    """Tables: of the KL by name, and of the shares by gradients."""
    if not rows:
        return
    base = "union" if "union" in rows[0]["kl"] else "product"
    names = [name for name in rows[0]["kl"] if all(name in row["kl"] for row in rows)]
    columns = {name: [mean(row["kl"][name]) for row in rows] for name in names}
    later = [sum(row["kl"][base][1:]) / len(row["kl"][base]) for row in rows]
    found = estimates({name: ratio(columns[name], later if "readers" in name else columns[base]) for name in names})
    print(f"{len(rows)} questions\n\n| what | KL answer | median | of {base}'s |\n| --- | --- | --- | --- |")
    for name, column in columns.items():
        own = found[name]
        told = "-" if own.value is None else f"{own.value:.2f}{_bounds(own.interval, 2)}"
        print(f"| {name} | {mean(column):.4f}{_bounds(interval_of(column), 4)} | {median(column):.4f} | {told} |")
    if rows[0]["facts"]:
        show_shares(rows)


def _bounds(interval: Interval | None, digits: int) -> str:
    """An interval; nothing where there is none."""
    return "" if interval is None else f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def show_shares(rows: list[dict[str, Any]]) -> None:
    """Of all that is left: whose it is, and in how few rows and tokens."""
    for which in ("shares of reuse", "shares"):
        facts = [row["facts"][which] for row in rows]
        whole = sum(one["total"] for one in facts)
        print(f"\n{which}: keys, values and rows of\n")
        for name in facts[0]["rows"]:
            parts = [sum(one["rows"][name][place] for one in facts if name in one["rows"]) for place in range(3)]
            tokens = sum(row["facts"]["tokens"] for row in rows)
            print(f"- {name}: {parts[0] / whole:.2f}, {parts[1] / whole:.2f}, {parts[2] / tokens:.1%} of the rows")
        tops = {share: sum(one["top"][share] for one in facts) / whole for share in facts[0]["top"]}
        print(f"- in the heaviest rows: {', '.join(f'{float(s):.0%}: {part:.2f}' for s, part in tops.items())}")
        layers = [
            [sum(one["layers"][n][side] for one in facts) / whole for side in (0, 1)]
            for n in range(len(facts[0]["layers"]))
        ]
        print("- layers, keys and values:", ", ".join(f"{n}: {k:.2f} {v:.2f}" for n, (k, v) in enumerate(layers)))
    tokens = [
        (kl, copied, place)
        for row in rows
        for place, (kl, copied) in enumerate(zip(row["kl"]["union"], row["facts"]["copied"], strict=True))
    ]
    whole = sum(kl for kl, _, _ in tokens)
    for name, some in (
        ("first", [kl for kl, _, place in tokens if not place]),
        ("later, copied on", [kl for kl, copied, place in tokens if place and copied]),
        ("later, others", [kl for kl, copied, place in tokens if place and not copied]),
    ):
        if some:
            print(f"- tokens, {name}: {len(some)}, mean {mean(some):.4f}, {sum(some) / whole:.2f} of all")


if __name__ == "__main__":
    main()
