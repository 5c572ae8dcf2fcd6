"""Read a folder once, then ask it: the shortest way from documents to an answer.

python samples/quickstart.py [DOCUMENTS] [QUESTION]
"""

from __future__ import annotations

import sys
from pathlib import Path

import kvtool

HERE = Path(__file__).resolve().parent


def main(
    documents: str | Path = HERE / "corpus" / "places",
    question: str = "Who founded the observatory at Kellhaven?",
    store: str | Path = HERE.parent / ".demo" / "quickstart",
    model: str = "smollm2",  # the packaged model; a hub name, a folder or a GGUF file does as well
) -> None:
    with kvtool.open(store, model=model) as cache:
        cache.ingest(documents)  # computes the KV cache of each passage; the next run finds nothing new to do
        reply = cache.query(question, top_k=3, max_tokens=32)  # joins the stored caches of the best passages

    print(question)
    print(reply.answer.strip())
    for chunk in reply.chunks:
        print(f"  {chunk.status:5} {chunk.place}")
    tokens = reply.tokens
    print(f"{tokens['reused']} of {tokens['prompt']} tokens reused; first token after {reply.timing_ms['ttft']:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
