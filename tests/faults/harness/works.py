"""The commands that write, each with where it starts and what it is to leave whole. A new command is one more line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from kvtool.cli.app import main
from kvtool.core.cache.layout import read_uuid
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.prefix_cache import decode_part
from kvtool.core.model.options import ModelOptions
from kvtool.core.session.session import Session
from tests.cli.working import write_corpus
from tests.families import save_tiny
from tests.faults.harness.flips import pulled, verified
from tests.faults.harness.reading import Facts, Known, read_all
from tests.faults.harness.subject import LOOK, Subject, copy, kvtool

_TEMPORARY = re.compile(r"\.tmp-.*|\..+-[0-9]+-[0-9a-f]{8}")


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
        kvtool("ingest", made.corpus, "--store", made.half, *model, *LOOK)
        kvtool("store", "push", f"file://{made.half_tier}", "--store", made.half)
        kvtool("ingest", subject.corpus, "--store", made.plain, *model, *LOOK)
        kvtool("compress", "--fit", "--level", "4", "--store", made.plain, "--questions", "0")
        copy(subject.store, made.thinned)
        kvtool("store", "rm", subject.corpus / "mill1.md", subject.corpus / "mill3.md", "--store", made.thinned)
        hybrid = ("--model", save_tiny("qwen3.5", folder / "hybrid"), "--chunk-tokens", "64")
        kvtool("ingest", made.corpus, "--store", made.states, *hybrid, "--store-dtype", "float32")  # exact answers
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
        code, said = 0, io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                if self.does is not None:
                    self.does(folder)
                else:
                    code = main([*map(str, self.words(bases, folder)), "--store", str(store)])
            except KvtoolError as error:
                code = error.exit_code
        if code:
            raise Refused(code, said.getvalue())
        return code


class Refused(Exception):
    """An exit code other than 0."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"exit {code}: {said[-400:]}")


def _half(bases: Bases) -> int:
    return size_of(bases.subject.store) // 2


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


_ASKED = ["query", "Who built the third mill?", *"--documents mill2.md --fusion prefix --max-tokens 4".split()]
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
    Work("question", lambda b: b.states, lambda b, f: [*_ASKED, "--set", "load.state_cache_size=1GB"], asks=True),
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


# ---- what is there afterwards ----


@dataclass
class Kept:
    """The contents of a store or a shared store, each with a digest; and what is wrong with it."""

    things: dict[str, str]
    documents: list[str]
    wrong: list[str]


def kept_in(work: Work, folder: Path, scratch: Path) -> dict[str, object]:
    """Of what the command writes, in a child. A store that was not there before may be missing."""
    path = folder / work.into
    if work.into == "tier":
        wrong = pulled(path, scratch)
        path = scratch
    else:
        wrong = [] if not _is_made(path) else verified(path)
    things, documents = ({}, []) if not _is_made(path) else _things(path, wrong)
    if work.asks:
        things["answer "] = _answered(folder, wrong)
    return {"things": things, "documents": documents, "wrong": wrong}


def _is_made(path: Path) -> bool:
    """Whether there is a store, or what is left is not one yet: the next run makes it."""
    return (path / "store.json").exists() and (path / "current").exists() and (path / "data").exists()


def _answered(folder: Path, wrong: list[str]) -> str:
    """An answer from a copy, which keeps nothing of it."""
    asked = copy(folder / "store", folder.parent / "asked")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*_ASKED, "--store", str(asked), "--set", "load.state_cache_size=0", "--json"])
    if code or "damaged" in err.getvalue():
        wrong.append(f"exit {code}: {(out.getvalue() + err.getvalue())[-400:]}")
        return ""
    return str(json.loads(out.getvalue())["answer"])


def _things(path: Path, wrong: list[str]) -> tuple[dict[str, str], list[str]]:
    with closing(Store.open(path)) as store:
        if not store.chunk_ids():
            return {}, []
        facts = read_all(store, Known.of(store), 0)
        _take_stretches(store, facts)
        wrong += facts.said
        for source in store.sources():
            document = store.document(source)
            for ref in document.chunks if document is not None else ():
                if store.chunk_info(ref.chunk_id) is None:
                    wrong.append(f"a chunk of {source} is lost")
        exact = {name: one for name, one in facts.tensors.items() if "decoded" not in name}
        return facts.passages | exact, store.sources()


def _take_stretches(store: Store, facts: Facts) -> None:
    """What is kept of a model's states: each description; all of its parts are read."""
    for stretch, info in store.stretches().items():
        name = f"stretch {stretch.hex()}"
        facts.take(facts.passages, name, lambda stretch=stretch: store.stretch(stretch))
        for place in info.places:
            facts.take({}, name, lambda s=stretch, p=place: decode_part(store.read_part(s, p)).keys())


def leftovers(folder: Path) -> list[str]:
    """Return unneeded files that a killed writer has left."""
    found = [str(one) for one in folder.rglob("*") if _TEMPORARY.fullmatch(one.name)]
    generations = list((folder / "store/data").glob("gen-*"))
    return found + [f"{len(generations)} generations"] * (len(generations) > 1)


def make_old(folder: Path) -> None:
    """Age temporary files: kvtool keeps recent ones, which may still be in use."""
    for path in folder.rglob("*"):
        if _TEMPORARY.fullmatch(path.name):
            before = path.stat().st_mtime - 30 * 86400
            os.utime(path, (before, before))


def committed(told: Path) -> Iterator[str]:
    if told.exists():
        yield from told.read_text().split("\n")[:-1]
