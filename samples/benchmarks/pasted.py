"""Time to the first token of a stock OpenAI client that pastes passages, with and without spotting.

    python samples/benchmarks/pasted.py STORE [--questions N] [--passages N] [--repeat N]

Serves a store, asks questions of `samples/questions.jsonl` with the passages that words find pasted into the message,
as a program that retrieves by itself does, and prints medians: spotted (the default), the same prompt by full prefill,
and `--no-spot`, where the server retrieves passages of its own before that message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.retrieval.finder import Finder, Retrieval
from samples.benchmarks.serve_load import serving

QUESTIONS = Path(__file__).parents[1] / "questions.jsonl"
WAYS: dict[str, dict[str, Any]] = {
    "spotted": {},
    "full prefill": {"fusion": "full"},
    "`--no-spot`": {"spot": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    asked = [row["question"] for row in rows if row["lang"] == "en"][: given.questions]
    with Store.open(given.store) as store:
        finder = Finder(store)
        prompts = [pasted(finder, question, given.passages) for question in asked]
    with tempfile.TemporaryDirectory() as home, serving(given.store, 16, 1, Path(home)) as (host, port, key):
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key=key, timeout=600, max_retries=0)
        for own in WAYS.values():
            asked_once(client, prompts[0], own)  # the model is loaded, kernels are compiled
        told = {way: [] for way in WAYS}
        for _ in range(given.repeat):
            for prompt in prompts:
                for way, own in WAYS.items():
                    told[way].append(asked_once(client, prompt, own))
    print("| way | prompt tokens | of them cached | first token, s | of full prefill's time |")
    print("| --- | --- | --- | --- | --- |")
    full = [seconds for seconds, _, _ in told["full prefill"]]
    for way, rows_of in told.items():
        seconds, tokens, cached = (statistics.median(column) for column in zip(*rows_of, strict=True))
        ratio = statistics.median(one[0] / whole for one, whole in zip(rows_of, full, strict=True))
        print(f"| {way} | {tokens:.0f} | {cached:.0f} | {seconds:.2f} | {ratio:.2f} |")


def pasted(finder: Finder, question: str, passages: int) -> str:
    """Return a message as a RAG program writes it."""
    hits = finder.find(question, passages, Retrieval("bm25")).hits
    texts = [(finder.own_text(hit.passage) or "").strip() for hit in hits]
    context = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))
    return f"Use the following passages to answer.\n\n{context}\n\nQuestion: {question}\nAnswer in a few words."


def asked_once(client: openai.OpenAI, prompt: str, own: dict[str, Any]) -> tuple[float, int, int]:
    """Return the seconds to the first token, the prompt's tokens, and those that came from the store."""
    started, first = time.perf_counter(), 0.0
    stream = client.chat.completions.create(
        model="kvtool",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kvtool": own},
    )
    for chunk in stream:
        if not first and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - started
        usage = chunk.usage
    return first, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


if __name__ == "__main__":
    main()
