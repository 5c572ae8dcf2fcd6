"""What questions ask of a bucket through a store in front: empty at first, filled beforehand, and bounded.

    python samples/front_asked.py --store STORE [--questions 200] [--share 0.25]

The bucket is moto's server on this machine. Questions are those of `questions.jsonl`, drawn by Zipf's law; each finds
its chunks and reads all of their KV, as answering does, and nothing is computed. The journal for `store warm` holds
other draws of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.query.asked import read_asked
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.remote.opening import local_place, open_shared
from kvtool.core.remote.push import push
from kvtool.core.remote.urls import open_blobs
from kvtool.core.remote.warm import warm
from kvtool.core.retrieval.finder import Finder
from kvtool.core.upkeep.budget import keep_budget, read_budget

URL = "s3://bucket/kv"
QUESTIONS = Path(__file__).resolve().parent / "questions.jsonl"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.25)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bucket(Path(folder)) as log:
        with closing(open_blobs(URL)) as blobs, Store.open(given.store) as store:
            push(store, blobs)
            whole = int(store.stats()["bytes"])
        print("| store in front | requests a question | KB a question | questions that fetch nothing |")
        print("| --- | --- | --- | --- |")
        for name, share, filled in (
            ("empty at first", None, False),
            ("filled beforehand", None, True),
            (f"at most {given.share:.0%} of the KV", given.share, False),
            ("the same, filled beforehand", given.share, True),
        ):
            os.environ["KVTOOL_HOME"] = str(Path(folder) / name)
            print(f"| {name} |", measured(log, given.questions, share and share * whole, filled), "|", flush=True)


@contextmanager
def bucket(folder: Path) -> Iterator[Path]:
    """An S3 with an empty bucket; the log has a line for each request."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = folder / "server.log"
    place = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": place,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    with log.open("wb") as lines:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=lines, stderr=lines)
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(urllib.request.Request(f"{place}/bucket", method="PUT"), timeout=30).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield log
        finally:
            server.kill()
            server.wait()


def drawn(count: int, seed: int) -> list[str]:
    """Questions by Zipf's law."""
    rows = [json.loads(line)["question"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    return random.Random(seed).choices(rows, [1 / (rank + 1) for rank in range(len(rows))], k=count)


def measured(log: Path, count: int, budget: float | None, filled: bool) -> str:
    """Ask, and count what the server was asked and what came."""
    options = QueryOptions()
    with open_shared(URL, timeout=60) as store:
        place = local_place(URL)
    if budget is not None:
        keep_budget(place, read_budget_of(place) + int(budget))
    with open_shared(URL, timeout=60) as store:
        finder = Finder(store)
        if filled:
            journal = log.parent / "journal.jsonl"
            journal.write_text(
                "".join(json.dumps({"question": one}) + "\n" for one in drawn(count, 1)), encoding="utf-8"
            )
            asked = read_asked(journal, store, finder, options, time.time())
            warm(store, asked.warmth, level="auto", max_loss=options.max_loss)
        before, size, nothing = requests(log), 0, 0
        for question in drawn(count, 2):
            came = ask(store, finder, question, options)
            size, nothing = size + came, nothing + (came == 0)
    return f"{(requests(log) - before) / count:.2f} | {size / count / 1e3:,.0f} | {nothing / count:.0%}"


def read_budget_of(place: Path) -> int:
    """Bytes that are there."""
    with Store.open(place) as store:
        return read_budget(store).used


def ask(store: Store, finder: Finder, question: str, options: QueryOptions) -> int:
    """Read what a question is answered from. Returns the bytes that had to come for it."""
    chunks = [hit.passage.chunk_id for hit in options.find(finder, Request(question)).hits]
    came = sum(store.level_sizes(chunk)["raw"] for chunk in chunks if "raw" not in store.sizes_here(chunk))
    info = store.chunk_info(chunks[0])
    for layer in range(info.layers if info is not None else 0):
        assert all(isinstance(read, tuple) for read in store.read_layer(chunks, "raw", layer))
    store.note_access(chunks)
    return came


def requests(log: Path) -> int:
    """That the server has got."""
    return log.read_bytes().count(b" HTTP/1.1")


if __name__ == "__main__":
    main()
