"""Invariants: a store with something of everything in it, all that can be read of it as facts by name, and what a
command leaves. An injured store may lack facts, and must not have others."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import LEVELS, NESTED
from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.prefix_cache import decode_part
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.answer import answer
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request
from kvtool.core.records.read import read_chunk
from kvtool.core.session.identity import ProfileCache, store_identity
from kvtool.core.session.session import Session
from tests.cli.working import damages, kvtool, write_corpus
from tests.families import save_tiny
from tests.retrieval.conftest import tokenizer

if TYPE_CHECKING:
    from tests.chaos.commands import Work

ASKED = ["query", "Who built the third mill?", *"--documents mill2.md --fusion prefix --max-tokens 4".split()]
_TEMPORARY = re.compile(r"\.tmp-.*|\..+-[0-9]+-[0-9a-f]{8}")
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


def make_subject(folder: Path, model: str | None = None, documents: int = 6, paragraphs: int = 3) -> Subject:
    """Make raw, lossless and all lossy records, index, vectors, profile and gate result; and a shared store of it."""
    os.environ["KVTOOL_HOME"] = str(folder / "home")
    places = (folder / name for name in ("corpus", "store", "tier", "store.kvpack"))
    made = Subject(folder, model or str(save_tiny("llama", folder / "model")), *places)
    write_corpus(made.corpus, documents, paragraphs)
    words = folder / "words"
    save_words(words)
    store = ("--store", made.store)
    kvtool("ingest", made.corpus, *store, "--model", made.model, "--embedder", words, *LOOK).fine()
    kvtool("compress", "--fit", "--level", "1", "2", "3", "4", *store, "--questions", "0").fine()
    kvtool("compress", "--level", "lossless", *store, "--questions", "0").fine()
    for question in QUESTIONS:
        kvtool("query", question, *store, "--max-tokens", "1").fine()
    kvtool("store", "push", f"file://{made.tier}", *store).fine()
    kvtool("store", "export", made.pack, *store).fine()
    return made


def save_words(path: Path) -> None:
    """An embedding model of few words, each with a direction of its own."""
    from model2vec import StaticModel

    words = "[UNK] [PAD] mill built baker flour grinds first second third fourth fifth sixth".split()
    StaticModel(np.eye(len(words), dtype=np.float32) + 0.05, tokenizer(words)).save_pretrained(path)


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


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ---- facts of a store ----

REPORTED = (10, 12, 13)  # no store, misfit, damaged


@dataclass
class Facts:
    """Digests by name of all that was read, and damage that was reported, warnings included."""

    tensors: dict[str, str] = field(default_factory=dict)
    passages: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def take(self, into: dict[str, str], name: str, read: Callable[[], Any]) -> Any:
        try:
            value = read()
        except KvtoolError as error:
            if error.exit_code not in REPORTED:
                raise
            self.said.append(f"{name}: {error.message}")
            return None
        if value is not None and value != {}:  # a state that is not there
            into[name] = _digest(value)
        return value


def _digest(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(value, digest_size=12).hexdigest()
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Known:
    chunks: tuple[bytes, ...]
    layers: int
    sources: tuple[str, ...]
    files: tuple[str, ...]
    profiles: tuple[bytes, ...]

    @classmethod
    def of(cls, store: Store) -> Known:
        chunks = tuple(store.chunk_ids())
        info = store.chunk_info(chunks[0])
        assert info is not None
        files = tuple(entry.path for entry in store.files())
        return cls(chunks, info.layers, tuple(store.sources()), files, tuple(store.profile_digests()))


def read_all(store: Store, known: Known, dice: int) -> Facts:
    facts = Facts()
    small = facts.passages
    for name in ("manifest", "codec_state", "sources", "chunk_ids", "revision"):
        facts.take(small if name in ("manifest", "codec_state") else {}, name, getattr(store, name))
    for path in known.files:
        facts.take(small, f"file {path}", lambda path=path: store.file(path))
    for source in known.sources:
        document = facts.take(small, f"document {source}", lambda source=source: store.document(source))
        for ref in document.chunks if document is not None else ():
            info = facts.take({}, "passage", lambda ref=ref: store.chunk_info(ref.chunk_id))
            if info is not None:
                small[_passage(source, ref.start, ref.end)] = _digest(info.token_ids)
    for digest in known.profiles:
        facts.take(facts.tensors, f"profile {digest.hex()}", lambda digest=digest: store.profile(digest))
    for chunk in known.chunks:
        _look_at(facts, store, chunk)
    for level in LEVELS:
        for layer in range(known.layers):
            _read_layer(facts, store, known.chunks, level, layer)
    _decode(facts, store, known, dice)
    return facts


def _look_at(facts: Facts, store: Store, chunk: bytes) -> None:
    small, name = facts.passages, chunk.hex()
    if (info := facts.take({}, f"chunk {name}", lambda: store.chunk_info(chunk))) is not None:
        small[f"chunk {name}"] = _digest((info.token_ids, info.lead_in, info.layers))
        if info.arithmetic is not None:  # it has had KV
            small[f"measures of {name}"] = _digest((info.sensitivity, info.arithmetic))
    for level in facts.take({}, f"levels {name}", lambda: store.levels(chunk)) or ():
        small[f"level {level} of {name}"] = ""


def _read_layer(facts: Facts, store: Store, chunks: Sequence[bytes], level: str, layer: int) -> None:
    found = facts.take({}, f"level {level}, layer {layer}", lambda: store.read_layer(chunks, level, layer)) or ()
    for chunk, record in zip(chunks, found, strict=False):
        name = f"{chunk.hex()} {level} {layer}"
        if isinstance(record, KvtoolError):
            facts.said.append(f"{name}: {record.message}")
        elif record is not None:
            facts.tensors[name] = _digest((record[0], _digest(record[1])))


def _decode(facts: Facts, store: Store, known: Known, dice: int) -> None:
    chunk, shelf = known.chunks[dice % len(known.chunks)], ProfileCache(store)
    for level in ("lossless", *NESTED):

        def decoded(level: str = level) -> bytes | None:
            if level not in store.levels(chunk):
                return None
            made = read_chunk(store, chunk, level, known.layers, shelf)
            return b"".join(
                side.contiguous().view(torch.uint8).numpy().tobytes() for side in (*made.keys, *made.values)
            )

        facts.take(facts.tensors, f"decoded {chunk.hex()} {level}", decoded)


def ask_all(store: Store, decoder: Any, facts: Facts) -> None:
    """Questions: the passages that they find, and what is answered from these."""
    warned: list[str] = facts.said
    identity = facts.take({}, "identity", lambda: store_identity(store))
    if identity is None:
        return
    session = Session.open(store, identity=identity, decoder=decoder, warn=lambda text, hint: warned.append(text))
    for number, question in enumerate(QUESTIONS):
        for how in ("bm25", "auto"):
            options = QueryOptions(retriever=how, max_tokens=2, top_k=3, offline=True)
            name = f"question {number} by {how}"
            facts.take(facts.passages, name, lambda o=options, q=question: _found(session, q, o, facts))
        facts.take(facts.passages, f"answer {number}", lambda o=options, q=question: _answer(session, q, o, facts))


def _found(session: Session, question: str, options: QueryOptions, facts: Facts) -> object:
    asked = lay_out(session, Request(question), options)
    for hit, segment in zip(asked.hits, asked.plan.chunks, strict=True):
        facts.passages[_passage(hit.passage.source, hit.passage.start, hit.passage.end)] = _digest(segment.ids)
    return [(hit.passage.chunk_id, round(hit.score, 9)) for hit in asked.hits]


def _passage(source: str, start: int, end: int) -> str:
    return f"passage {source} {start} {end}"


def _answer(session: Session, question: str, options: QueryOptions, facts: Facts) -> object:
    """The ids said. Of another prompt than the sound store's (a miss, another level) it is not to be compared."""
    reply = answer(session, Request(question), options)
    missed = [f"{chunk.id}: {chunk.reason}" for chunk in reply.chunks if chunk.status == "miss"]
    facts.said += missed
    made_of = [(one.source.chunk_id, one.source.level, one.status) for one in reply.fused.plan.segments]
    facts.passages[f"made {question} {_digest(made_of)}"] = _digest(reply.generated.ids)
    return None


def compare(truth: Facts, found: Facts) -> tuple[list[str], int]:
    """Names of facts that are wrong, and how many are missing in a damaged store."""
    # With damage reported, fewer passages are there to be found; each must still be one.
    ignored = ("question ",) if found.said else ()
    wrong, missing = list[str](), 0
    for sound, injured in ((truth.tensors, found.tensors), (truth.passages, found.passages)):
        names = (name for name in injured if not name.startswith("made ") or name in sound)
        wrong += [name for name in names if sound.get(name) != injured[name] and not name.startswith(ignored)]
        # of other prompts, and of other chunks
        missing += sum(name not in injured for name in sound if not name.startswith(("made ", "decoded ")))
    return wrong, missing


def verified(path: Path) -> list[str]:
    try:
        return damages(path)
    except KvtoolError as error:
        return [error.message]


def pulled(tier: Path, to: Path) -> list[str]:
    from kvtool.core.remote.blobs import open_blobs
    from kvtool.core.remote.pull import pull

    shutil.rmtree(to, ignore_errors=True)
    try:
        with closing(open_blobs(f"file://{tier}")) as blobs:
            return [row["reason"] for row in pull(to, blobs).damaged]
    except KvtoolError as error:
        if error.exit_code not in REPORTED:
            raise
        return [error.message]


def import_pack(pack: Path, to: Path, warned: list[str]) -> Store:
    from kvtool.core.remote.options import ImportOptions
    from kvtool.core.remote.packs import take

    shutil.rmtree(to, ignore_errors=True)
    warned += [row["reason"] for row in take(to, pack, ImportOptions(mine=True)).damaged]
    return Store.open(to)


# ---- what a command leaves ----


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
    done = kvtool(*ASKED, "--store", asked, "--set", "load.state_cache_size=0", "--json")
    if done.code or "damaged" in done.err:
        wrong.append(f"exit {done.code}: {(done.out + done.err)[-400:]}")
        return ""
    return str(done.json["answer"])


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
