"""The whole tool on a small corpus: ingest, compress, then the same questions in every fusion mode, and one table.

Run by `make demo`; `python samples/demo.py --help` shows what can be changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool.cli.out import Out

HERE = Path(__file__).resolve().parent
MODES = "prefix,reuse,epic,blend,infoflow,union"
KVTOOL = [sys.executable, "-P", "-m", "kvtool"]  # -P: nothing in the working directory is run


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    out = Out()
    batch = options.folder / "questions.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    write_batch(options, batch)
    place = ["--store", str(options.folder / "store")]
    run(["ingest", str(HERE / "corpus"), "--model", options.model, *place])
    run(["compress", "--fit", "--level", options.level, *place])
    asked = ["--batch", str(batch), "--compare", MODES, "--max-tokens", "32", "--level", options.level]
    lines = run(["query", *asked, *place], capture=True)
    rows = [json.loads(line) for line in lines.splitlines()]
    if not rows or rows[-1].get("failed") != 0:
        raise SystemExit("error: some questions were not answered")
    show_answers(out, rows[0])
    show_table(out, rows[-1])
    out.print(f"\n{rows[-1]['count']} questions, {time.perf_counter() - started:.0f} s in all; store: {place[1]}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=16, help="how many of samples/questions.jsonl (default 16)")
    parser.add_argument("--lang", default="en", help="their language; the packaged model reads English (default en)")
    parser.add_argument("--model", default="smollm2", help="default: the packaged model")
    parser.add_argument("--level", default="2", help="codec level that the questions are answered from (default 2)")
    parser.add_argument("--folder", type=Path, default=HERE.parent / ".demo", help="where the store goes")
    return parser.parse_args()


def write_batch(options: argparse.Namespace, path: Path) -> None:
    """The first questions of the sample as a batch file; the tool finds the chunks by itself."""
    lines = (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [row for row in map(json.loads, lines) if row["lang"] == options.lang][: options.questions]
    kept = [{name: row[name] for name in ("id", "question", "answers")} for row in questions]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")


def run(command: Sequence[str], capture: bool = False) -> str:
    """Run kvtool as a user would; its words go to the terminal."""
    print("$ kvtool", *command, file=sys.stderr, flush=True)
    done = subprocess.run([*KVTOOL, *command], stdout=subprocess.PIPE if capture else None, text=True, encoding="utf-8")
    if done.returncode not in (0, 3):
        raise SystemExit(done.returncode)
    return done.stdout or ""


def show_answers(out: Out, row: dict[str, Any]) -> None:
    answers = [(reply["fusion"], reply["answer"]) for reply in row["runs"]]
    out.print(f"\n{row['question']}\n")
    out.table(("mode", "answer"), answers)
    out.print()


def show_table(out: Out, summary: dict[str, Any]) -> None:
    columns = (
        *("mode", "contains", "F1", "exact", "KL answer", "reused", "recomputed", "fresh"),
        *("MB read", "TTFT ms", "speedup"),
    )
    full = summary["runs"][0]["ttft_ms_median"]
    out.table(columns, [table_row(run, full) for run in summary["runs"]], title="means; TTFT: median")


def table_row(run: dict[str, Any], full: float) -> tuple[Any, ...]:
    scores = (f"{run[name]:.2f}" for name in ("contains", "f1", "exact_match"))
    counts = (f"{run['tokens_' + name]:.0f}" for name in ("reused", "recomputed", "fresh"))
    ttft = run["ttft_ms_median"]
    speed = (f"{run['bytes_read'] / 1e6:.1f}", f"{ttft:.0f}", f"{full / ttft:.1f}x")
    return (run["fusion"], *scores, f"{run['kl_answer']:.3f}", *counts, *speed)


if __name__ == "__main__":
    main()
