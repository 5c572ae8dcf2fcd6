"""All that can be read of a store, as facts by name: an injured store may lack facts, and must not have others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import LEVELS, NESTED
from kvtool.core.errors import KvtoolError
from kvtool.core.query.answer import answer
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Request
from kvtool.core.records.read import read_chunk
from kvtool.core.session.identity import ProfileCache, store_identity
from kvtool.core.session.session import Session
from tests.faults.harness.subject import QUESTIONS

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
        facts.take(small, f"chunk {chunk.hex()}", lambda chunk=chunk: store.chunk_info(chunk))
        for level in facts.take({}, f"levels {chunk.hex()}", lambda chunk=chunk: store.levels(chunk)) or ():
            small[f"level {level} of {chunk.hex()}"] = ""
    for level in LEVELS:
        for layer in range(known.layers):
            _read_layer(facts, store, known.chunks, level, layer)
    _decode(facts, store, known, dice)
    return facts


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
