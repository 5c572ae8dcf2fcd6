"""Every command's JSON, run once each on a tiny store: what the test of names and the documentation look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, chunks_of, drop_records, kvtool, write_corpus

Objects = list[dict[str, Any]]


def every_command(folder: Path, store: Path, fitted: Path, tiny: Path) -> dict[str, Objects]:
    """The objects on stdout by the command's name.

    Parameters
    ----------
    folder : an empty one to work in.
    store : a raw store of `write_corpus` (six documents), to be used up.
    fitted : a store with a profile and all levels, to be used up.
    """
    corpus = write_corpus(folder / "corpus", 2)
    (corpus / "odd.txt").write_bytes(b"\0\1\2\3")
    batch = folder / "batch.jsonl"
    questions = ({"id": "a", "question": QUESTION, "answers": ["baker A"]}, {"question": "zzyzx"})
    batch.write_text("".join(json.dumps(row) + "\n" for row in questions))
    good = folder / "good.jsonl"
    good.write_text(json.dumps(questions[0] | {"sources": ["mill1.md"]}) + "\n")
    chunk, damaged, *_ = chunks_of(store, "mill2.md")
    tier, pack = f"file://{folder / 'tier'}", folder / "all.kvpack"
    drop_records(store, damaged)  # a hole, so that there is a miss
    here, there, schemes = ("--store", store), ("--store", fitted), ("--scheme", "1", "--scheme", "int8")
    fresh = ("--store", folder / "fresh")
    return {
        name: list(_objects(*args))
        for name, args in {
            "ingest": ("ingest", corpus, *fresh, "--model", tiny, *CHUNKS, *PREFIX, "--json"),
            "serve": ("serve", "--show-key", "--json"),
            "ingest (events)": ("ingest", corpus, *fresh, "--strict", "--jsonl"),
            "ingest (dry run)": ("ingest", corpus, *fresh, "--dry-run", "--json"),
            "compress": ("compress", *fresh, "--fit", "--level", "1", "--level", "lossless", "--json"),
            "compress (events)": ("compress", *fresh, "--level", "3", "--jsonl"),
            "query": ("query", QUESTION, *here, *SHORT, "--token-ids", "--explain", "--json"),
            "search": ("search", *QUESTION.split(), *here, "--json"),
            "query (auto)": ("query", QUESTION, *here, *SHORT, "--fusion", "auto", "--json"),
            "query (deferred)": ("query", QUESTION, *here, *SHORT, "--defer", "--set", "defer.threshold=1", "--json"),
            "query (events)": ("query", QUESTION, *here, *SHORT, "--jsonl"),
            "query --compare": ("query", QUESTION, *here, *SHORT, "--compare", "reuse", "--json"),
            "query (batch)": ("query", "--batch", batch, *here, *SHORT, "--audit", "1"),
            "inspect audit": ("inspect", "audit", *here, "--json"),
            "query --compare (batch)": ("query", "--batch", good, *here, *SHORT, "--compare", "reuse"),
            "error (a question)": ("query", "zzyzx", *here, "--json"),
            "error (events)": ("query", "zzyzx", *here, "--jsonl"),
            "query (kept)": ("query", QUESTION, *here, *SHORT, "--keep-alive", "2m", "--json"),
            "ps": ("ps", "--json"),
            "stop": ("stop", *here, "--json"),
            "inspect": ("inspect", *there, "--json"),
            "inspect gate": ("inspect", "gate", *here, "--json"),
            "inspect codec": ("inspect", "codec", *there, "--batch", good, *schemes, "--json"),
            "eval": ("eval", good, *here, "--runs", "reuse,epic:4", "--json"),
            "eval --make": ("eval", folder / "made.jsonl", "--make", "1", *here, "--json"),
            "inspect deviation": ("inspect", "deviation", QUESTION, *here, "--json"),
            "inspect sparsity": ("inspect", "sparsity", QUESTION, *here, "--json"),
            "inspect plan": ("inspect", "plan", QUESTION, *here, "--json"),
            "inspect plan (deferred)": ("inspect", "plan", QUESTION, "--defer", *here, "--json"),
            "inspect chunk": ("inspect", "chunk", chunk, *here, "--json"),
            "store stats": ("store", "stats", *there, "--json"),
            "store ls": ("store", "ls", *there, "--json"),
            "store pin": ("store", "pin", chunk, *here, "--json"),
            "store pin (undone)": ("store", "pin", "--remove", chunk, *here, "--json"),
            "store push": ("store", "push", tier, *here, "--json"),
            "query (shared)": ("query", QUESTION, "--store", tier, *SHORT, "--slo-ms", "5000", "--json"),
            "store push (pull)": ("store", "pull", tier, "--store", folder / "pulled", "--json"),
            "store export": ("store", "export", pack, *here, "--json"),
            "store import": ("store", "import", pack, "--store", folder / "taken", "--json"),
            "store import (several)": ("store", "import", pack, store, "--store", folder / "merged", "--json"),
            "store rm": ("store", "rm", "*mill5.md", *here, "--json"),
            "store prune": ("store", "prune", "--max-size", "1", *there, "--dry-run", "--json"),
            "store compact": ("store", "compact", *here, "--json"),
            "store verify": ("store", "verify", *here, "--sample", "1/1", "--json"),
            "config": ("config", "show", "--json"),
            "doctor": ("doctor", *here, "--json"),
            "config plugins": ("config", "plugins", "--json"),
        }.items()
    }


def _objects(*args: object) -> Iterator[dict[str, Any]]:
    done = kvtool(*args)
    for line in done.out.splitlines():
        yield json.loads(line)
    if not done.out:
        raise AssertionError((args, done.code, done.err))
