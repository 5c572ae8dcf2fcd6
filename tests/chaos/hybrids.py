"""A store of a model that keeps states, and questions about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.working import CHUNKS, SHORT, Done, kvtool, write_corpus
from tests.families import save_tiny

FIRST, SECOND = "Who built the third mill?", "When was the second mill finished, and for whom?"


def ingest(folder: Path, store: Path, *more: object) -> Done:
    return kvtool("ingest", folder / "corpus", "--model", folder / "model", "--store", store, *CHUNKS, *more)


def asked(store: Path, question: str, mode: str, *more: object, document: str = "mill2.md") -> list[object]:
    words = ["query", question, "--store", store, "--documents", document, "--fusion", mode, *SHORT, "--json"]
    return [*words, *more]


def ask(store: Path, question: str, mode: str = "prefix", *more: object, document: str = "mill2.md") -> Done:
    return kvtool(*asked(store, question, mode, *more, document=document)).fine()


def make_hybrid(folder: Path, *questions: str) -> Path:
    """Make a corpus, a model, and a store of exact numbers that has answered these questions."""
    torch.set_num_threads(1)
    write_corpus(folder / "corpus", 4)
    save_tiny("qwen3.5", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        ingest(folder, folder / "store", "--store-dtype", "float32").fine()
        for question in questions:
            ask(folder / "store", question)
    return folder
