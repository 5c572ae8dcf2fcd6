"""The Python interface, call by call: fusion modes, streaming, a conversation, compression, removal, errors.

python samples/python_api.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import kvtool

PLACES = Path(__file__).resolve().parent / "corpus" / "places"
QUESTION = "Who founded the observatory at Kellhaven?"


def main(store: str | Path, documents: Path = PLACES, question: str = QUESTION, model: str = "smollm2") -> None:
    with kvtool.open(store, model=model) as cache:
        report = cache.ingest(documents, chunk_tokens=128)
        print(f"stored: {report.to_json()['chunks']}")

        for fusion in ("full", "reuse", "epic", "union"):  # from everything recomputed to nearly nothing
            reply = cache.query(question, fusion=fusion, top_k=3, max_tokens=16)
            computed = reply.tokens["recomputed"] + reply.tokens["fresh"]
            print(f"{fusion:6} {computed:4} tokens computed  {reply.timing_ms['ttft']:6.0f} ms  {reply.answer!r}")

        cache.query(question, stream=lambda piece: print(piece, end="", flush=True), max_tokens=16)
        print()

        talk = cache.conversation(top_k=2, max_tokens=16)
        talk.ask(question)
        reply = talk.ask("And when was that?")  # searched together with the question before it
        print(f"second turn: {reply.tokens['resident']} tokens kept from the first, {reply.answer!r}")

        levels = cache.compress("2").to_json()["levels"]  # fits the codec to this store, measures the loss
        print(f"compressed: {[level['level'] for level in levels]}")
        print(cache.query(question, level="2", top_k=3, max_tokens=16).answer)

        removed = cache.remove(sorted(documents.iterdir())[0])
        print(f"removed: {[Path(source).name for source in removed.sources]}")

    try:
        kvtool.open(store).query(question, ratio="150%")
    except kvtool.KvtoolError as error:
        print(f"{error.message}; {error.hint}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "store")
