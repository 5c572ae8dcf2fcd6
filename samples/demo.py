"""The whole tool on a small corpus: ingest, ask, compress, then questions in every fusion mode, and one table.

Run by `make demo`; `python samples/demo.py --help` shows what can be changed.
"""

from __future__ import annotations

import argparse
import json
import shlex
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
PATIENT = ["--lock-wait", "10m"]  # another demo may be writing to the store
FEW = 4  # questions that the part of the corpus is enough for
PART = ("people", "places")  # folders of the corpus


def main() -> None:
    options = arguments()
    out, started = Out(), time.perf_counter()
    folders = options.folders or (PART if options.questions <= FEW else all_folders())
    questions = chosen(options, folders)
    place = ["--store", str(options.folder / "store")]
    first, *others = ([str(HERE / "corpus" / folder)] for folder in folders)

    step(out, 1, f"ingest: the KV of samples/corpus/{folders[0]} is computed, once; all takes minutes on idle cores")
    run(["ingest", *first, "--model", options.model, *place, *PATIENT])
    step(out, 2, "query: a first answer")
    run(["query", chosen(options, folders[:1])[0]["question"], "--max-tokens", "24", *place])
    out.print(f"first answer after {time.perf_counter() - started:.0f} s")
    step(out, 3, "ingest again: only what is new is computed")
    run(["ingest", *first, *(folder for paths in others for folder in paths), *place, *PATIENT])
    step(out, 4, "compress: a profile is fitted, the loss is measured")
    run(["compress", "--fit", "--fit-prompts", "24", "--level", options.level, "--keep-raw", *place, *PATIENT])
    step(out, 5, f"query --compare: {len(questions)} questions in seven modes")
    asked = ["--batch", str(write_batch(options, questions)), "--compare", MODES]
    lines = run(["query", *asked, "--max-tokens", "32", "--level", options.level, *place], capture=True)
    rows = [json.loads(line) for line in lines.splitlines()]
    if not rows or rows[-1].get("failed") != 0:
        raise SystemExit("error: some questions were not answered")
    answered = (row for row in rows[:-1] if any(reply.get("contains") for reply in row["runs"]))
    shown = next(answered, rows[0])  # the packaged model is small: the first question that a mode answers
    show_answers(out, shown)
    show_table(out, rows[-1])
    out.print(f"\n{rows[-1]['count']} questions, {time.perf_counter() - started:.0f} s in all; store: {place[1]}")
    out.print("Small models answer badly in any mode, and prompts as short as these gain least.")
    out.print(f"\nAsk it yourself:\n\n    {program()} query {shlex.quote(shown['question'])} {shlex.join(place)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    few = f"how many of samples/questions.jsonl; more than {FEW}: over the whole corpus (default {FEW})"
    parser.add_argument("--questions", type=int, default=FEW, help=few)
    parser.add_argument("--folders", nargs="+", help=f"of samples/corpus (default {' '.join(PART)})")
    parser.add_argument("--lang", default="en", help="their language; the packaged model reads English (default en)")
    parser.add_argument("--model", default="smollm2", help="default: the packaged model")
    parser.add_argument("--level", default="2", help="codec level that the questions are answered from (default 2)")
    parser.add_argument("--folder", type=Path, default=HERE.parent / ".demo", help="where the store goes")
    return parser.parse_args()


def all_folders() -> Sequence[str]:
    """List the folders of the corpus, that of the first answer first."""
    folders = sorted(path.name for path in (HERE / "corpus").iterdir() if path.is_dir())
    return sorted(folders, key=lambda name: name != PART[0])


def chosen(options: argparse.Namespace, folders: Sequence[str]) -> list[dict[str, Any]]:
    """Choose the first questions of the sample whose answers are in these folders."""
    rows = map(json.loads, (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines())
    asked = [row for row in rows if row["lang"] == options.lang and folders_of(row) <= {*folders}]
    if not asked:
        raise SystemExit(f"error: no question of samples/questions.jsonl is about {', '.join(folders)}")
    return asked[: options.questions]


def folders_of(row: dict[str, Any]) -> set[str]:
    return {source.split("/")[0] for source in row.get("sources", [row["source"]])}


def write_batch(options: argparse.Namespace, questions: Sequence[dict[str, Any]]) -> Path:
    """Write a file for `query --batch`, which names no chunks: the tool retrieves them."""
    kept = [{name: row[name] for name in ("id", "question", "answers")} for row in questions]
    options.folder.mkdir(parents=True, exist_ok=True)
    path: Path = options.folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    return path


def step(out: Out, number: int, what: str) -> None:
    out.print(f"\n{number}/5 {what}")
    out.flush()


def run(command: Sequence[str], capture: bool = False) -> str:
    """Run kvtool as a user would; its words go to the terminal."""
    print("$ kvtool", shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run([*KVTOOL, *command], stdout=subprocess.PIPE if capture else None, text=True, encoding="utf-8")
    if done.returncode not in (0, 3):
        raise SystemExit(done.returncode)
    return done.stdout or ""


def program() -> str:
    """Return how kvtool is called here: from the folder of the Python that runs this, which need not be on PATH."""
    beside = Path(sys.executable).parent / "kvtool"
    if not beside.exists():
        return "kvtool"
    return shlex.quote(str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside))


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
    try:
        main()
    except KeyboardInterrupt:  # the command that ran has said what it leaves
        sys.exit(130)
