"""The commands that write, each with where it starts and what it is to leave whole. A new command is one more line."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from kvtool.core.cache.layout import read_uuid
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import KvtoolError
from kvtool.core.model.options import ModelOptions
from kvtool.core.session.session import Session
from tests.chaos.invariants import ASKED, LOOK, Subject, copy, size_of
from tests.cli.working import kvtool, write_corpus
from tests.families import save_tiny


@dataclass(frozen=True, slots=True)
class Bases:
    subject: Subject
    corpus: Path  # edited since `half` was made of it
    half: Path  # a store of a part of the documents
    plain: Path  # a store with a profile, whose records are raw and of one level
    thinned: Path  # a store from which documents were removed
    half_tier: Path
    states: Path  # as `half`, of a model that keeps states
    learned: Path  # learned passages of `half`

    @classmethod
    def make(cls, subject: Subject, documents: int = 12) -> Bases:
        folder = subject.folder / "bases"
        made = cls(
            subject,
            folder / "corpus",
            *(folder / name for name in ("half", "plain", "thinned", "tier", "states", "learned/store")),
        )
        if folder.exists():
            return made
        write_corpus(made.corpus, 3, 3)
        model = ("--model", subject.model)
        kvtool("ingest", made.corpus, "--store", made.half, *model, *LOOK).fine()
        kvtool("store", "push", f"file://{made.half_tier}", "--store", made.half).fine()
        kvtool("ingest", subject.corpus, "--store", made.plain, *model, *LOOK).fine()
        kvtool("compress", "--fit", "--level", "4", "--store", made.plain, "--questions", "0").fine()
        copy(subject.store, made.thinned)
        kvtool("store", "rm", subject.corpus / "mill1.md", subject.corpus / "mill3.md", "--store", made.thinned).fine()
        hybrid = ("--model", save_tiny("qwen3.5", folder / "hybrid"), "--store-dtype", "float32")  # exact answers
        kvtool("ingest", made.corpus, "--store", made.states, *hybrid, "--chunk-tokens", "64").fine()
        start_learning(made.half, made.learned.parent)
        learn(made.learned.parent, 0, 4)
        write_corpus(made.corpus, documents, 3)
        (made.corpus / "mill1.md").unlink()
        (made.corpus / "mill0.md").write_text("# Another\n\nThe first mill was sold to nobody in 1901.")
        return made


@dataclass(frozen=True, slots=True)
class Work:
    """A command.

    Attributes
    ----------
    base : what it starts from; None: nothing. `words` : what is run then. `does` : what, in place of a command.
    into : `store` or `tier`: what of a folder it writes.
    asks : whether a question is answered from what it leaves.
    most : bytes that it is to leave at most, where that is its purpose: what it drops then hangs on what was dropped
        already. None: what it leaves after a kill and another run is what an undisturbed run leaves.
    """

    name: str
    base: Callable[[Bases], Path] | None
    words: Callable[[Bases, Path], list[object]] = lambda bases, folder: []
    into: str = "store"
    most: Callable[[Bases], int] | None = None
    asks: bool = False
    does: Callable[[Path], object] | None = None

    def start(self, bases: Bases, folder: Path) -> None:
        if self.does is not None:
            start_learning(bases.half, folder)
        if self.base is not None:
            copy(self.base(bases), folder / self.into)

    def run(self, bases: Bases, folder: Path, told: Path) -> int:
        """Run it in a child and return the exit code; each committed file's path is logged to `told`."""
        real = Writer.commit_file

        def commit_file(self: Writer, entry: object, documents: object) -> None:
            real(self, entry, documents)  # type: ignore[arg-type]
            with told.open("a") as log:
                log.write(f"{entry.path}\n")  # type: ignore[attr-defined]

        Writer.commit_file = commit_file  # type: ignore[method-assign, assignment]
        store = folder / "store" if self.into == "store" else bases.subject.store
        code, said = 0, ""
        try:
            if self.does is not None:
                self.does(folder)
            else:
                done = kvtool(*self.words(bases, folder), "--store", store)
                code, said = done.code, done.out + done.err
        except KvtoolError as error:
            code = error.exit_code
        if code:
            raise Refused(code, said)
        return code


class Refused(Exception):
    """An exit code other than 0."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"exit {code}: {said[-400:]}")


def _half(bases: Bases) -> int:
    return size_of(bases.subject.store) // 2


_COMPRESS = "compress --level 1 2 3 --drop-raw --yes --questions 0".split()
WORKS = [
    Work("ingest", lambda b: b.half, lambda b, f: ["ingest", b.corpus, "--sync"]),
    Work("first ingest", None, lambda b, f: ["ingest", b.corpus, "--model", b.subject.model, *LOOK]),
    Work("compress", lambda b: b.plain, lambda b, f: [*_COMPRESS]),
    Work(
        "prune",
        lambda b: b.subject.store,
        lambda b, f: ["store", "prune", "--max-size", _half(b), "--yes"],
        most=_half,
    ),
    Work("compact", lambda b: b.thinned, lambda b, f: ["store", "compact"]),
    Work("import", None, lambda b, f: ["store", "import", b.subject.pack]),
    Work("push", lambda b: b.half_tier, lambda b, f: ["store", "push", f"file://{f / 'tier'}"], into="tier"),
    Work("pull", lambda b: b.half, lambda b, f: ["store", "pull", f"file://{b.subject.tier}", "--mine"]),
    Work("ingest of states", lambda b: b.states, lambda b, f: ["ingest", b.corpus, "--sync"], asks=True),
    # A question keeps its prompt's states.
    Work("question", lambda b: b.states, lambda b, f: [*ASKED, "--set", "load.state_cache_size=1GB"], asks=True),
    Work("learn", lambda b: b.learned, does=lambda f: learn(f, 4, 10)),  # as `serve --learn` does, after its answers
]


def start_learning(half: Path, folder: Path) -> None:
    """Put a store into a folder, and its learned passages next to it."""
    copy(half, folder / "main")
    (folder / "store").mkdir(exist_ok=True)
    link = folder / "cache/learned" / read_uuid(half)
    link.parent.mkdir(parents=True)
    link.symlink_to(folder / "store")


def learn(folder: Path, first: int, end: int, budget: int = 10**9) -> None:
    """Learn the passages that are not there yet, each a chunk of its own."""
    with patch.dict(os.environ, KVTOOL_CACHE=str(folder / "cache")), closing(Store.open(folder / "main")) as store:
        session = Session.open(store, ModelOptions(offline=True)).with_learning(budget)
        assert session.learned is not None
        for number in range(first, end):
            chunk = session.learned.wanted("all", tuple(range(10 * number, 10 * number + 120)))
            if not session.learned.store.has_chunk(chunk.chunk_id):
                session.learned.put("all", chunk, f"Passage {number}.")
        session.learned.close()
