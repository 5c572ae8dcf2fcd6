"""Means of one or two batches of answers with 95 % intervals, and the paired difference of the two.

    kvtool query --batch questions.jsonl … --json > a.jsonl
    python samples/tools/paired.py a.jsonl [b.jsonl] [--score f1 contains]

Questions are drawn again with replacement (bootstrap); those of two files are paired by their `id`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.reports.summary import interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", type=Path, nargs="+", help="one or two outputs of `kvtool query --batch --json`")
    parser.add_argument("--score", nargs="+", default=["f1", "contains"], help="default: f1 contains")
    options = parser.parse_args()
    for name in options.score:
        scores = [scores_of(path, name) for path in options.batches]
        for path, by_id in zip(options.batches, scores, strict=True):
            print(f"{path.name} {name}: {with_interval(list(by_id.values()))}")
        if len(scores) == 2:
            first, second = scores
            differences = [first[key] - second[key] for key in first if key in second]
            print(f"difference of {name}, {len(differences)} pairs: {with_interval(differences)}")


def scores_of(path: Path, name: str) -> dict[str, float]:
    """A score of each answer, by the question's id; the summary and questions without gold answers have none."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {str(row["id"]): float(row[name]) for row in rows if "id" in row and name in row}


def with_interval(values: list[float]) -> str:
    bounds = interval(values)
    if bounds is None:
        return "no scores"
    return f"{sum(values) / len(values):.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]"


if __name__ == "__main__":
    main()
