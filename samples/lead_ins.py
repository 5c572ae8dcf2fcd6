"""What stands before a chunk when it is prefilled, and how far each fusion mode is from full recompute behind it.

    python samples/lead_ins.py CORPUS BATCH.jsonl [--lead-in none bos sink:4 prefix warm FILE] [--limit 8]

ingests CORPUS once for every lead-in, asks the same questions of each store and prints one row a lead-in: the mean KL
of the answer in nats against `full`, mode by mode. A FILE is a UTF-8 text that takes the packaged passage's place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

KVTOOL = [sys.executable, "-P", "-m", "kvtool"]  # -P: nothing in the working directory is run
SHORT = Path(__file__).with_name("short.txt")  # the instruction of benchmarks
LEAD_INS = ("none", "bos", "sink:4", "prefix", "warm")
SELECTORS = {"epic": "16", "blend": "0.15", "infoflow": "0.15", "union": "0.15"}
RUNS = ("reuse", *(f"{mode}{shift}:{amount}" for mode, amount in SELECTORS.items() for shift in ("+shift=no", "")))


def main() -> None:
    options = arguments()
    print(f"| lead-in | {' | '.join(RUNS)} |", f"|{' --- |' * (len(RUNS) + 1)}", sep="\n")
    for lead_in in options.lead_in:
        distances = answer_distances(options, lead_in)
        print(f"| `{lead_in}` | {' | '.join(f'{distances[name]:.3f}' for name in RUNS)} |", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="a folder of documents")
    parser.add_argument("batch", type=Path, help="questions, as for `kvtool query --batch`")
    parser.add_argument("--lead-in", nargs="+", default=LEAD_INS, help=f"default: {' '.join(LEAD_INS)}")
    parser.add_argument("--limit", type=int, default=8, help="how many questions (default 8)")
    parser.add_argument("--model", default="smollm2", help="default: the packaged model")
    parser.add_argument("--max-tokens", type=int, default=24, help="of an answer (default 24)")
    return parser.parse_args()


def answer_distances(options: argparse.Namespace, lead_in: str) -> dict[str, float]:
    """The mean KL of the answer by run, from a store that is made for this lead-in and thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        place = ["--store", str(Path(folder) / "store"), "--quiet"]
        made = ["--model", options.model, "--lead-in", lead_in, "--system", f"@{SHORT}"]
        kvtool("ingest", str(options.corpus), *made, *place)
        asked = ["--batch", str(options.batch), "--limit", str(options.limit), "--max-tokens", str(options.max_tokens)]
        wanted = ["--runs", ",".join(RUNS), "--level", "raw", "--json"]
        report = json.loads(kvtool("inspect", "quality", *asked, *wanted, *place))
    return {run["run"]: run["kl_answer"] for run in report["runs"]}


def kvtool(*command: str) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [*KVTOOL, *command], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
