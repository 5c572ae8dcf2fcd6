"""Readers with concurrent writers: every answer is the one that an idle store gives at the same revision.

Several processes ask a small store, while this one ingests (documents are added, changed and removed), compresses,
prunes and compacts. After each commit a copy of the store is kept. At the end every answer is compared with that of the
copy of its revision: its text, its chunks, its token counts and the logits of its first token.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.core.cache import layout
from kvtool.core.cache.environment import Environment
from kvtool.core.cache.store import Store

ROOT = Path(__file__).resolve().parents[2]
MILLS = ("water", "wind", "hill", "river", "ship", "oil", "paper", "saw")
QUESTIONS = [f"Who built the {which} mill?" for which in MILLS]
ASKED: dict[str, Any] = {"max_tokens": 4, "top_k": 3}
MODES = ("union", "reuse", "epic")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Numbers of answers, of their revisions, and of commits meanwhile; answers that differed, readers that failed."""

    answers: int
    revisions: int
    commits: int
    wrong: list[str]

    def __str__(self) -> str:
        return f"{self.answers} answers of {self.revisions} revisions, {self.commits} commits"


# ---- one reader --------------------------------------------------------------------------------------------------


def ask(store: Path, questions: int, seed: int) -> Iterator[dict[str, Any]]:
    """A reader's answers as they come: one open store for all of them."""
    import torch

    import kvtool

    torch.set_num_threads(1)
    dice, told = random.Random(seed), []
    with kvtool.open(store, offline=True, warn=lambda text, hint: told.append(text)) as cache:
        for _ in range(questions):
            asked = dice.choice(QUESTIONS), dice.choice(MODES)
            reply = cache.query(asked[0], fusion=asked[1], **ASKED)
            yield {"asked": asked, "revision": reply.revision, "told": told.copy(), **facts(reply)}
            told.clear()


def facts(reply: Any) -> dict[str, Any]:
    logits = hashlib.blake2b(reply.fused.logits.numpy().tobytes(), digest_size=16).hexdigest()
    chunks = [[chunk.id, chunk.source, chunk.start, chunk.end, chunk.line, chunk.status] for chunk in reply.chunks]
    return {"answer": reply.answer, "chunks": chunks, "tokens": reply.tokens, "logits": logits}


def ask_from_threads(store: Path, rounds: int) -> tuple[str, list[str]]:
    """Ask one session from four threads; return how many answers there were, and which differ from the serial ones."""
    import torch

    import kvtool
    from kvtool.core.fusion.selectors import FUSIONS

    asked = [(question, mode) for question in QUESTIONS[:3] for mode in FUSIONS]
    torch.set_num_threads(1)
    with kvtool.open(store, offline=True) as cache:

        def answer(one: tuple[str, str]) -> dict[str, Any]:
            return facts(cache.query(one[0], fusion=one[1], **ASKED))

        cache.query(QUESTIONS[0], fusion="auto", max_tokens=1)  # the machine is measured
        serial = {one: answer(one) for one in asked}
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(answer, asked * rounds))
    wrong = [f"{one} differs" for one, reply in zip(asked * rounds, found, strict=True) if reply != serial[one]]
    return f"{len(found)} answers in {len(FUSIONS)} modes", wrong


# ---- the writer --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def copies_of(store: Path, folder: Path) -> Iterator[None]:
    """Keep an idle copy of every revision that this process commits, as `folder/REVISION`."""
    write = Environment.write

    def written(self: Environment, *args: Any, **options: Any) -> Any:
        result = write(self, *args, **options)
        if self.generation.parent.parent == store:
            keep_copy(store, self, folder)
        return result

    Environment.write = written  # type: ignore[method-assign]
    try:
        with Store.open(store) as opened:
            keep_copy(store, opened.environment, folder)
        yield
    finally:
        Environment.write = write  # type: ignore[method-assign]


def keep_copy(store: Path, environment: Environment, folder: Path) -> None:
    place = folder / "new"
    shutil.rmtree(place, ignore_errors=True)
    data = place / layout.DATA_FOLDER / environment.generation.name
    data.mkdir(parents=True)
    environment.copy_to(data)
    for name in (layout.STORE_FILE, layout.CURRENT_FILE):
        shutil.copy(store / name, place / name)
    (place / layout.CURRENT_FILE).write_text(environment.generation.name)
    if (store / "gate").exists():
        shutil.copytree(store / "gate", place / "gate")
    with Store.open(place) as copy:
        revision = copy.revision()
    if not (folder / str(revision)).exists():
        place.rename(folder / str(revision))


def document(number: int, version: int) -> str:
    which = MILLS[number % len(MILLS)]
    lines = [f"The {which} mill was built in {1700 + 7 * version} by baker {chr(65 + version % 26)}."]
    for n in range(1, 2 + version % 3):
        lines.append(f"In the year {1800 + 5 * n + version} the {which} mill got wheel number {n + version}.")
    return f"# The {which} mill\n\n" + "\n\n".join(lines)


def write_corpus(corpus: Path) -> None:
    corpus.mkdir(parents=True)
    for number in range(6):
        (corpus / f"{number}.md").write_text(document(number, 0))


def change_for_ever(store: Path, corpus: Path) -> Iterator[None]:
    """One step of a writer after the other: documents change, come and go; levels are made and dropped; the file is
    compacted. A step leaves no hole, for then a reader would write, too."""
    from kvtool.core.compress.job import compress
    from kvtool.core.compress.options import CompressOptions
    from kvtool.core.ingest.job import ingest
    from kvtool.core.ingest.options import IngestOptions

    for version in itertools.count(1):
        (corpus / f"{version % 5}.md").write_text(document(version, version))
        (corpus / "5.md").unlink(missing_ok=True)
        ingest(store, IngestOptions(paths=(corpus,), sync=True, offline=True))
        yield
        (corpus / "5.md").write_text(document(version + 3, version))
        ingest(store, IngestOptions(paths=(corpus,), sync=True, offline=True))
        yield
        compress(store, CompressOptions(levels=("lossless",), questions=0, offline=True))
        yield
        prune(store)
        yield


def prune(store: Path) -> None:
    """What `store prune` does to what is stored twice, and then a compaction."""
    with Store.open(store) as opened, opened.writer() as writer:
        twice = [chunk for chunk in opened.chunk_ids() if {"raw", "lossless"} <= set(opened.levels(chunk))]
        writer.drop_level(twice, "raw")
        writer.collect(keep=set(opened.chunk_ids()) - chunks_of_documents(opened) - set(twice))
        writer.compact()


def chunks_of_documents(store: Store) -> set[bytes]:
    return {ref.chunk_id for entry in store.documents() for ref in entry.chunks}


# ---- all together ------------------------------------------------------------------------------------------------


def run(folder: Path, model: str, processes: int = 4, questions: int = 200) -> Outcome:
    """Make a store in a new folder, ask it from several processes while this one changes it, and compare."""
    from kvtool.core.ingest.job import ingest
    from kvtool.core.ingest.options import IngestOptions

    corpus, store = folder / "corpus", folder / "store"
    write_corpus(corpus)
    ingest(store, IngestOptions(paths=(corpus,), model=model, chunk_tokens=64, lead_in="prefix"))
    outs = [folder / f"reader-{number}.jsonl" for number in range(processes)]
    commands = [[sys.executable, __file__, str(store), str(questions), str(number)] for number in range(processes)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(copies_of(store, folder / "copies"))
        readers = [
            subprocess.Popen(
                command,
                stdout=stack.enter_context(out.open("w")),
                stderr=stack.enter_context(out.with_suffix(".err").open("w")),
                env=variables,
            )
            for command, out in zip(commands, outs, strict=True)
        ]
        try:
            steps = change_for_ever(store, corpus)
            while any(reader.poll() is None for reader in readers):
                next(steps)
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
    wrong = [
        f"reader {number}: {out.with_suffix('.err').read_text()[-500:]}"
        for number, (out, reader) in enumerate(zip(outs, readers, strict=True))
        if reader.returncode
    ]
    rows = [json.loads(line) for out in outs for line in out.read_text().splitlines()]
    wrong += compare(rows, folder / "copies")
    commits = sum(path.name.isdecimal() for path in (folder / "copies").iterdir()) - 1
    return Outcome(len(rows), len({row["revision"] for row in rows}), commits, wrong)


def compare(rows: list[dict[str, Any]], copies: Path) -> Iterator[str]:
    """Yield answers that differ from those of the idle copies, and warnings that a reader got."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sessions: list[Any] = []
    try:
        for revision in sorted({row["revision"] for row in rows}):
            if (copies / str(revision)).exists():
                yield from compare_with(
                    copies / str(revision), [row for row in rows if row["revision"] == revision], sessions
                )
            else:
                yield f"revision {revision} was never committed"
    finally:
        torch.set_num_threads(threads)


def compare_with(copy: Path, rows: list[dict[str, Any]], sessions: list[Any]) -> Iterator[str]:
    """The same for one idle copy; the model of the first session serves all."""
    from kvtool.core.model.options import ModelOptions
    from kvtool.core.query.answer import answer
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session

    expected: dict[tuple[str, str], dict[str, Any]] = {}
    with Store.open(copy) as store:
        if not sessions:
            sessions.append(Session.open(store, ModelOptions(offline=True)))
        session = Session.open(store, decoder=sessions[0].decoder, missed={})  # the copy stays as it is
        for row in rows:
            question, mode = asked = tuple(row["asked"])
            if asked not in expected:
                expected[asked] = facts(answer(session, Request(question), QueryOptions(fusion=mode, **ASKED)))
            found = {name: row[name] for name in expected[asked]}
            if found != expected[asked] or row["told"]:
                yield f"{copy.name}, {asked}: {found} {row['told']}, idle: {expected[asked]}"


if __name__ == "__main__":  # a reader: STORE QUESTIONS SEED
    for row in ask(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])):
        print(json.dumps(row), flush=True)
