"""Subjects of faults: a store of a tiny model with something of everything in it, its shared store, and its pack."""

from __future__ import annotations

import os
import shutil
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch

from kvtool.cli.app import main
from kvtool.core.cache.store import Store
from kvtool.core.model.options import ModelOptions
from kvtool.core.session.session import Session
from tests.cli.working import write_corpus
from tests.families import save_tiny

QUESTIONS = ("Who built the third mill?", "When did baker C build the first mill?", "flour of the sixth mill")
LOOK = ("--chunk-tokens", "64", "--lead-in", "prefix")


@dataclass(frozen=True, slots=True)
class Subject:
    """Folders of it; nothing in them is changed: copies are injured."""

    folder: Path
    model: str
    corpus: Path
    store: Path
    tier: Path
    pack: Path


def kvtool(*args: object) -> None:
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main([str(arg) for arg in args])
    if code:
        raise RuntimeError(f"kvtool {' '.join(map(str, args))}: exit {code}\n{said.getvalue()}")


def make_subject(folder: Path, model: str | None = None, documents: int = 6, paragraphs: int = 3) -> Subject:
    """Make raw, lossless and all lossy records, index, vectors, profile and gate result; and a shared store of it."""
    os.environ["KVTOOL_HOME"] = str(folder / "home")
    places = (folder / name for name in ("corpus", "store", "tier", "store.kvpack"))
    made = Subject(folder, model or str(save_tiny("llama", folder / "model")), *places)
    write_corpus(made.corpus, documents, paragraphs)
    words = folder / "words"
    save_words(words)
    store = ("--store", made.store)
    kvtool("ingest", made.corpus, *store, "--model", made.model, "--embedder", words, *LOOK)
    kvtool("compress", "--fit", "--level", "1", "2", "3", "4", *store, "--questions", "0")
    kvtool("compress", "--level", "lossless", *store, "--questions", "0")
    for question in QUESTIONS:
        kvtool("query", question, *store, "--max-tokens", "1")
    kvtool("store", "push", f"file://{made.tier}", *store)
    kvtool("store", "export", made.pack, *store)
    return made


def save_words(path: Path) -> None:
    """An embedding model of few words, each with a direction of its own."""
    import numpy as np
    from model2vec import StaticModel
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = "[UNK] [PAD] mill built baker flour grinds first second third fourth fifth sixth".split()
    made = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    StaticModel(np.eye(len(words), dtype=np.float32) + 0.05, made).save_pretrained(path)


def decoder_of(subject: Subject) -> object:
    torch.set_num_threads(1)
    with closing(Store.open(subject.store)) as store:
        return Session.open(store, ModelOptions(offline=True)).decoder


def copy(path: Path, to: Path) -> Path:
    if to.is_dir():
        shutil.rmtree(to)
    if path.is_file():
        to.parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(path, to))
    return Path(shutil.copytree(path, to))
