"""Local store → shared tier: what is missing there, then the catalogue, then the head in one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from kvtool.core.cache import keys
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import LOSSY
from kvtool.core.errors import DamagedError, KvtoolError, RemoteError, StoreFormatError, StoreNotFoundError
from kvtool.core.remote import local
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import (
    HEAD,
    Catalogue,
    Chunk,
    File,
    Level,
    chunk_name,
    digest_of,
    file_name,
    kv_names,
    seal_head,
    unseal_head,
)
from kvtool.core.remote.report import Events, TransferReport

_TRIES = 8  # pushes of others that come in between
_SMALL_AT_ONCE = 256


def read_head(blobs: Blobs) -> tuple[bytes | None, Catalogue | None]:
    """The tier's head as it stands and its catalogue; (None, None) where nothing was ever pushed.

    Raises
    ------
    RemoteError : the tier does not answer.
    DamagedError : what is there cannot be read.
    StoreFormatError : a newer kvtool pushed.
    """
    (head,) = blobs.get([HEAD])
    if head is None:
        return None, None
    digest = unseal_head(head)
    (packed,) = blobs.get([f"catalogue/{digest}"])
    if packed is None or digest_of(packed) != digest:
        raise DamagedError(f"the catalogue of {blobs.url} is lost or damaged", "push again from a store that is whole")
    return head, Catalogue.unpack(packed)


def read_catalogue(blobs: Blobs) -> Catalogue:
    """The catalogue of a tier that was pushed to; raises StoreNotFoundError where nothing was, and as read_head."""
    _, found = read_head(blobs)
    if found is None:
        raise StoreNotFoundError(f"there is no store at {blobs.url}", f"make one with `kvtool store push {blobs.url}`")
    return found


def check_same_identity(mine: dict[str, object], other: dict[str, object], url: str) -> None:
    """Raises StoreFormatError where two stores were made with another model, lead-in, split or instruction."""
    differs = sorted(key for key in {*mine, *other} - {"model"} if mine.get(key) != other.get(key))
    if differs:
        raise StoreFormatError(
            f"the store at {url} was made with another {', '.join(differs)}",
            "push to another place (another database, ?prefix= or folder), or ingest with the same settings",
        )


def push(
    store: Store,
    blobs: Blobs,
    *,
    delete: bool = False,
    newer: bool = False,
    verify: bool = False,
    events: Events | None = None,
) -> TransferReport:
    """Bring a tier up to date with a store. Run again to resume; what is there already is not sent again.

    Parameters
    ----------
    delete : forget what the store does not have; else the tier keeps it.
    newer : of a file that both have in two versions take the one changed last; else the store's.
    verify : read back what is there already, and send again what is damaged or missing.

    Raises
    ------
    RemoteError, NoSpaceError : the tier does not answer, or is full. What was sent stays.
    StoreFormatError : it holds a store of another model.
    """
    started = time.perf_counter()
    job = _Push(store, blobs, TransferReport("push", blobs.url), events or Events())
    job.run(delete, newer, verify)
    job.report.seconds = time.perf_counter() - started
    return job.report


class _Push:
    def __init__(self, store: Store, blobs: Blobs, report: TransferReport, events: Events) -> None:
        self.store, self.blobs, self.report, self.events = store, blobs, report, events

    def run(self, delete: bool, newer: bool, verify: bool) -> None:
        if not self.store.manifest():
            raise StoreNotFoundError(f"the store at {self.store.path} is empty", "run `kvtool ingest PATH` first")
        head, there = self._there(verify)
        mine = local.survey(self.store, there, self.report.note_damage)
        self._send(mine, None if verify else there, verify)
        for _ in range(_TRIES):
            if there is not None:
                check_same_identity(mine.identity, there.identity, self.blobs.url)
            joined = mine if there is None or delete else join(mine, there, newer)
            if there is not None and joined == there:
                break
            if self._publish(head, joined):
                break
            head, there = read_head(self.blobs)
        else:
            raise RemoteError(f"{self.blobs.url} changes all the time", "try again when no other push runs")
        if delete:
            self._sweep(joined)

    def _there(self, verify: bool) -> tuple[bytes | None, Catalogue | None]:
        """What is there; a push that verifies replaces a catalogue that is damaged."""
        try:
            head, there = read_head(self.blobs)
        except DamagedError:
            if not verify:
                raise
            return self.blobs.get([HEAD])[0], None
        if there is not None:
            check_same_identity(self.store.manifest().get("identity", {}), there.identity, self.blobs.url)
        return head, there

    def _publish(self, head: bytes | None, joined: Catalogue) -> bool:
        packed = joined.pack()
        self.blobs.put({f"catalogue/{digest_of(packed)}": packed})
        self.blobs.settle()
        return self.blobs.swap(HEAD, head, seal_head(digest_of(packed)))

    # ---- sending ----

    def _send(self, mine: Catalogue, there: Catalogue | None, verify: bool) -> None:
        self._send_small(mine, there, verify)
        places = [(key, level) for key, chunk in mine.chunks.items() for level in chunk.levels]
        self.events.total(len(places))
        for key, level in places:
            known = there.chunks.get(key) if there is not None else None
            if known is not None and known.levels.get(level) == mine.chunks[key].levels[level]:
                self.report.chunks.there += 1
            else:
                self._send_level(key, mine.chunks[key], level, verify)
            self.events.advance(1)

    def _send_level(self, key: str, chunk: Chunk, level: str, verify: bool) -> None:
        names = kv_names(key, chunk, level)
        missing = self._missing(names, verify)
        if not missing:
            self.report.chunks.there += 1
            return
        records = dict(zip(names, local.records_of(self.store, bytes.fromhex(key), level, chunk.layers), strict=True))
        self._put({name: records[name] for name in missing})
        self.report.chunks.moved += 1

    def _send_small(self, mine: Catalogue, there: Catalogue | None, verify: bool) -> None:
        known = _small_names(there) if there is not None else set()
        self.report.files.there = sum(file_name(key, one) in known for key, one in mine.files.items())
        batch: dict[str, bytes] = {}
        for name, value in self._small_values(mine, known):
            batch[name] = value
            if len(batch) == _SMALL_AT_ONCE:
                self._put_small(batch, verify)
                batch = {}
        self._put_small(batch, verify)
        self.report.files.moved = len(mine.files) - self.report.files.there

    def _put_small(self, batch: dict[str, bytes], verify: bool) -> None:
        self._put({name: batch[name] for name in self._missing(list(batch), verify)})

    def _small_values(self, mine: Catalogue, known: set[str]) -> Iterator[tuple[str, bytes]]:
        for name, mark in mine.meta.items():
            yield f"meta/{name}-{mark}", local.meta_value(self.store, name)
        for digest in mine.profiles:
            if f"profile/{digest}" not in known:
                yield f"profile/{digest}", local.profile_value(self.store, digest)
        for entry in self.store.files():
            key = keys.name_key(entry.path).hex()
            if key in mine.files and file_name(key, mine.files[key]) not in known:
                yield file_name(key, mine.files[key]), local.file_value(self.store, entry)
        for key, chunk in mine.chunks.items():
            if chunk_name(key, chunk) not in known:
                info = self.store.chunk_info(bytes.fromhex(key))
                if info is None:
                    raise KvtoolError("the store was changed meanwhile", "push again")
                yield chunk_name(key, chunk), local.chunk_value(bytes.fromhex(key), info)

    def _missing(self, names: list[str], verify: bool) -> list[str]:
        if not verify:
            return [name for name, there in zip(names, self.blobs.has(names), strict=True) if not there]
        return [name for name, value in zip(names, self.blobs.get(names), strict=True) if not _is_whole(name, value)]

    def _put(self, values: dict[str, bytes]) -> None:
        if values:
            self.blobs.put(values)
            self.report.bytes += sum(map(len, values.values()))

    def _sweep(self, kept: Catalogue) -> None:
        wanted = {HEAD, f"catalogue/{digest_of(kept.pack())}", *kept.blobs()}
        doomed = [name for name in self.blobs.names() if name not in wanted]
        self.blobs.delete(doomed)
        self.report.removed = len(doomed)


def _is_whole(name: str, value: bytes | None) -> bool:
    """Whether a value that stands there is what its name says."""
    return value is not None and local.is_sound(name, value)


def _small_names(there: Catalogue) -> set[str]:
    found = {file_name(key, one) for key, one in there.files.items()}
    found |= {chunk_name(key, one) for key, one in there.chunks.items()}
    return found | {f"profile/{digest}" for digest in there.profiles}


# ---- two catalogues ----


def join(mine: Catalogue, there: Catalogue, newer: bool) -> Catalogue:
    """What both hold. Of what both have in two versions it is `mine`, or of files the one changed last."""
    files: dict[str, File] = there.files | mine.files
    if newer:
        for key in mine.files.keys() & there.files.keys():
            files[key] = max(mine.files[key], there.files[key], key=lambda one: (one.mtime_ns, one.mark))
    chunks = there.chunks | {
        key: join_chunks(one, there.chunks[key]) if key in there.chunks else one for key, one in mine.chunks.items()
    }
    profiles = tuple(sorted({*mine.profiles, *there.profiles}))
    return replace(mine, profiles=profiles, files=files, chunks=chunks)


def join_chunks(mine: Chunk, there: Chunk) -> Chunk:
    """Levels of both. Lossy ones may refine each other, so they are all of one side where they differ."""
    levels: dict[str, Level] = there.levels | mine.levels
    common = mine.levels.keys() & there.levels.keys() & set(LOSSY)
    if any(mine.levels[level].mark != there.levels[level].mark for level in common):
        levels = {name: one for name, one in levels.items() if name not in LOSSY or name in mine.levels}
    return replace(mine, levels=levels)
