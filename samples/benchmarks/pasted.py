"""Time to the first token of a stock client that pastes passages: with and without spotting, and with learning.

    python samples/benchmarks/pasted.py STORE [--questions N] [--passages N] [--repeat N] [--client openai|langchain]
    python samples/benchmarks/pasted.py STORE --learn [...]

Asks questions of `samples/questions.jsonl` with the passages that words find pasted into the message, as a program that
does its own retrieval does, and prints medians; processor time is the server's, over all cores. Without `--learn` the
store is served: spotted (the default), the same prompt by full prefill, and `--no-spot`, where the server retrieves
passages of its own before that message. With `--learn` an empty store is served, and the passages of each question come
with three questions, each time in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.passages import RetrievalOptions
from kvtool.core.session.identity import store_identity
from samples.benchmarks.serve_load import serving

Server = tuple[str, int, str]
"""Host, port and key."""
Ask = Callable[[Server, str, dict[str, Any]], tuple[int, int]]
Measure = Callable[[Server, str, dict[str, Any]], "Asked"]
QUESTIONS = Path(__file__).parents[1] / "questions.jsonl"
WAYS: dict[str, dict[str, Any]] = {
    "spotted": {},
    "full prefill": {"fusion": "full"},
    "`--no-spot`": {"spot": False},
}


Asked = tuple[float, float, int, int]
"""Seconds to the first token, the server's processor seconds until then, the prompt's tokens, and those reused."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--client", choices=ASKING, default="openai")
    parser.add_argument("--learn", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    asked = [row["question"] for row in rows if row["lang"] == "en"][: given.questions]
    with Store.open(given.store) as store:
        finder, model = Finder(store), store_identity(store).model
        found = [passages_for(finder, question, given.passages) for question in asked]
    measure = partial(measured, ASKING[given.client])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "empty") if given.learn else given.store
        more = ("--learn", "--model", model) if given.learn else ()
        with serving(place, 16, 1, Path(folder, "home"), *more) as server:
            if given.learn:
                told = learning(measure, server, asked, found)
            else:
                told = ways(measure, server, given.repeat, asked, found)
    print("| way | prompt tokens | of them reused | first token, s | processor time, s |")
    print("| --- | --- | --- | --- | --- |")
    for way, of_way in told.items():
        seconds, processor, tokens, cached = (statistics.median(column) for column in zip(*of_way, strict=True))
        print(f"| {way} | {tokens:.0f} | {cached:.0f} | {seconds:.2f} | {processor:.2f} |")


def ways(
    measure: Measure, server: Server, repeat: int, asked: Sequence[str], found: Sequence[list[str]]
) -> dict[str, list[Asked]]:
    """Ask each question in each way, in turn."""
    prompts = [pasted(*each) for each in zip(found, asked, strict=True)]
    for own in WAYS.values():
        measure(server, prompts[0], own)  # the model is loaded, kernels are compiled
    told: dict[str, list[Asked]] = {way: [] for way in WAYS}
    for _, prompt, (way, own) in product(range(repeat), prompts, WAYS.items()):
        told[way].append(measure(server, prompt, own))
    return told


def learning(
    measure: Measure, server: Server, asked: Sequence[str], found: Sequence[list[str]]
) -> dict[str, list[Asked]]:
    """Ask three questions of the passages of each, and full prefill of the last prompt."""
    measure(server, pasted(["A text of its own. " * 30], "What is this?"), {})
    told: dict[str, list[Asked]] = {}
    for number, passages in enumerate(found):
        for time_ in range(3):
            prompt = pasted(passages[time_:] + passages[:time_], asked[(number + time_) % len(asked)])
            told.setdefault(("first", "second", "third")[time_], []).append(measure(server, prompt, {}))
            until_learned(server)
        told.setdefault("full prefill", []).append(measure(server, prompt, {"fusion": "full"}))
    return told


def until_learned(server: Server) -> None:
    host, port, _ = server
    while json.loads(urllib.request.urlopen(f"http://{host}:{port}/health").read())["learning"]:
        time.sleep(0.05)


def passages_for(finder: Finder, question: str, passages: int) -> list[str]:
    """Return the passages that a question's words find."""
    hits = finder.find(question, RetrievalOptions(retriever="bm25", top_k=passages, min_score=0.0)).hits
    return [(finder.own_text(hit.passage) or "").strip() for hit in hits]


def pasted(passages: Sequence[str], question: str) -> str:
    """Return a message as a RAG program writes it."""
    context = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))
    return f"Use the following passages to answer.\n\n{context}\n\nQuestion: {question}\nAnswer in a few words."


def measured(ask: Ask, server: Server, prompt: str, own: dict[str, Any]) -> Asked:
    """Ask for one token."""
    before, started = processor_seconds(), time.perf_counter()
    prompt_tokens, cached = ask(server, prompt, own)
    return time.perf_counter() - started, processor_seconds() - before, prompt_tokens, cached


def processor_seconds() -> float:
    """Return the processor time of this process's children so far."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ticks = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13] for child in children]
    return sum(int(each) for pair in ticks for each in pair) / os.sysconf("SC_CLK_TCK")


def by_openai(server: Server, prompt: str, own: dict[str, Any]) -> tuple[int, int]:
    """Return the prompt's tokens, and those that were reused."""
    client = openai.OpenAI(base_url=url_of(server), api_key=server[2], timeout=600, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    done = client.chat.completions.create(model="kvtool", messages=messages, max_tokens=1, extra_body={"kvtool": own})
    return done.usage.prompt_tokens, done.usage.prompt_tokens_details.cached_tokens


def by_langchain(server: Server, prompt: str, own: dict[str, Any]) -> tuple[int, int]:
    """Ask as `by_openai` does, by LangChain's chat model."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="kvtool", base_url=url_of(server), api_key=server[2], max_tokens=1, extra_body={"kvtool": own}
    )
    usage = model.invoke(prompt).usage_metadata
    return usage["input_tokens"], usage["input_token_details"].get("cache_read", 0)


def url_of(server: Server) -> str:
    host, port, _ = server
    return f"http://{host}:{port}/v1"


ASKING: dict[str, Ask] = {"openai": by_openai, "langchain": by_langchain}

if __name__ == "__main__":
    main()
