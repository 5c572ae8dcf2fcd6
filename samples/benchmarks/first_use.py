"""Seconds from a folder of documents to the first answer, with nothing stored before, beside llama.cpp.

    python samples/benchmarks/first_use.py [FOLDER] [--model MODEL] [--question TEXT] [--dtype DTYPE] [--repeat 3]
        [--llama PYTHON --file FILE.gguf]

Each run has a new home for kvtool: no store, no converted tokenizer, no compiled code. It times `kvtool ingest --lazy`,
then `kvtool query` of one token, up to the printed answer, and, once the process has stored the passages, the same
question again. `--llama`: a Python that has llama-cpp-python; a process of it loads the model's FILE, computes the same
prompt and chooses a token. Before each process another one fills as much memory as the model takes: on a virtual
machine, memory that was not used for a while takes seconds at its first use. Medians are printed. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

_FILLED = 4 << 30  # bytes
SAMPLES = Path(__file__).resolve().parents[1]
_LLAMA = """
import json, sys, time
started = time.perf_counter()
import llama_cpp
ids, threads = json.load(sys.stdin), int(sys.argv[2])
model = llama_cpp.Llama(sys.argv[1], n_ctx=len(ids) + 64, n_batch=512, n_ubatch=512, n_threads=threads,
                        n_threads_batch=threads, verbose=False)
loaded = time.perf_counter()
model.eval(ids)
model.sample(temp=0)
print(json.dumps({"llama.cpp": time.perf_counter() - started, "llama.cpp, prompt": time.perf_counter() - loaded}))
"""


def fill_memory() -> None:
    subprocess.run([sys.executable, "-c", f"bytearray(b'1') * {_FILLED}"], check=True)


def ask(words: list[str], env: dict[str, str]) -> tuple[float, dict[str, Any]]:
    """Ask a question; return the seconds until the answer is printed, and its JSON. Passages are stored after it."""
    started = time.perf_counter()
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - started
    reply: dict[str, Any] = json.loads(line)
    return took, reply


def once(given: argparse.Namespace, home: str) -> dict[str, float]:
    env = {**os.environ, "KVTOOL_HOME": home, "KVTOOL_STORE": f"{home}/store"}
    tool = [sys.executable, "-P", "-m", "kvtool"]
    model = ["--dtype", given.dtype] if given.dtype else []
    fill_memory()
    started = time.perf_counter()
    subprocess.run([*tool, "ingest", given.folder, "--lazy", "--model", given.model, "-q"], env=env, check=True)
    seconds = {"askable": time.perf_counter() - started}
    query = [*tool, "query", given.question, "--max-tokens", "1", "--token-ids", "--json", "--keep-alive", "0", *model]
    fill_memory()
    seconds["answer"], reply = ask(query, env)
    seconds["answer, prompt"] = reply["timing_ms"]["ttft"] / 1e3
    fill_memory()
    seconds["again"], second = ask(query, env)
    seconds["again, prompt"] = second["timing_ms"]["ttft"] / 1e3
    segments = reply["segments"]
    ids = [*segments["prefix"], *(token for chunk in segments["chunks"] for token in chunk), *segments["question"]]
    seconds["tokens"] = len(ids)
    if given.llama:
        words = [given.llama, "-c", _LLAMA, given.file, str(os.cpu_count())]
        fill_memory()
        done = subprocess.run(words, input=json.dumps(ids), capture_output=True, text=True, check=True)
        seconds |= json.loads(done.stdout)
        seconds["times"] = seconds["answer"] / seconds["llama.cpp"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(SAMPLES / "corpus"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--question", default="Who founded the Kellhaven observatory?")
    parser.add_argument("--dtype")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--file", metavar="FILE.gguf", help="the model as llama.cpp reads it; by default MODEL")
    given = parser.parse_args()
    given.file = given.file or given.model
    runs = []
    for _ in range(given.repeat):
        with tempfile.TemporaryDirectory() as home:
            runs.append(once(given, home))
    for name in runs[0]:
        print(f"{name:18} {median(run[name] for run in runs):.2f}")


if __name__ == "__main__":
    main()
