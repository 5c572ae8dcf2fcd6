"""Store of learned passages: chunks of texts that clients send, each found again only for those who sent it.

It is a separate store in kvtool's cache folder: nothing of it is retrieved, listed, pushed or exported, and it takes no
space from ingested documents. Each of its documents is one chunk, `OWNER/CHUNK ID`. The owner is part of a chunk's id,
so two owners of one text have a copy each, and neither can tell by any time what the other has. So is the arithmetic:
servers on different devices do not replace each other's chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvtool.core.cache.entries import ChunkRef, ChunkSpec, DocumentEntry, FileEntry
from kvtool.core.cache.identity import HERE
from kvtool.core.cache.layout import folder_bytes, megabytes
from kvtool.core.cache.store import Store
from kvtool.core.common.files import cache_dir
from kvtool.core.common.types import Ids, Warn
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, StoreFormatError, StoreLockedError
from kvtool.core.records.encode import LeadIns, make
from kvtool.core.retrieval.passages import Passage
from kvtool.core.retrieval.spotting import Span, Spotter
from kvtool.core.session.identity import StoreIdentity, lead_ins_of

if TYPE_CHECKING:
    from kvtool.core.cache.writer import Writer
    from kvtool.core.model.decoder import Decoder

EVERYBODY = "all"  # owner of passages and conversations of clients without a key, or of all keys
_LOCK_WAIT = 0.2  # seconds; another server of the same store writes a chunk in less, and trims at its start in more
_TRIM_WAIT = 10.0  # seconds, at the start; another server may be compacting
_SPARE = 8  # an eviction leaves 1/8 of the budget free, so that the next one is not due at once


class LearnedStore:
    """The learned passages of a store. One thread uses it. Chunks of another lead-in, model or arithmetic are never
    found. `budget`: maximum bytes of the folder; the least recently used passages are evicted first. `warn` reports
    damage, once. Raises KvtoolError: the folder cannot be used."""

    def __init__(self, uuid: str, identity: StoreIdentity, decoder: Decoder, budget: int, warn: Warn) -> None:
        folder = cache_dir() / "learned" / uuid
        try:
            self.store = Store.create_or_open(folder)
            if self.store.read_only:
                self.store.close()
                raise KvtoolError(f"{folder} is read-only", "name another cache folder in KVTOOL_CACHE")
        except KvtoolError as error:
            raise KvtoolError(f"--learn cannot store passages: {error.message}", error.hint) from error
        self.identity, self._decoder, self._budget, self._warn = identity, decoder, budget, warn
        self._spotters: dict[str, Spotter] = {}
        self._places: dict[bytes, tuple[str, bytes]] = {}  # owner and chunk id, by the key of the document's file
        self._revision = -1
        self._foreign: tuple[StoreIdentity, set[bytes]] = identity, set()  # chunks that would be computed otherwise now
        self._lead_ins: tuple[StoreIdentity, LeadIns] | None = None

    def close(self) -> None:
        self._spotters.clear()  # they hold this object
        self.store.close()

    def spot(self, ids: Sequence[int], owner: str) -> list[Span]:
        """Find an owner's passages in a prompt's token ids; see `Spotter.spot`. A damaged store holds none."""
        try:
            self._follow()
        except (DamagedError, StoreFormatError) as error:
            self._warn(
                f"no learned passages are used: {error.message}", f"stop the server, and remove {self.store.path}"
            )
            return []
        spotter = self._spotters.get(owner)
        return [] if spotter is None else spotter.spot(ids)

    def _follow(self) -> None:
        revision = self.store.revision()
        anew = self._foreign[0] is not self.identity
        if revision == self._revision and not anew:
            return
        if anew:  # what was foreign may be found now, and the other way round
            self._foreign = self.identity, set()
            self._spotters.clear()
        with self.store.view():
            places = {key: self._places.get(key) or self._place(key) for key in self.store.file_marks()}
            changed = {(places.get(key) or self._places[key])[0] for key in places.keys() ^ self._places.keys()}
            changed.update(owner for owner, _ in places.values() if owner not in self._spotters)
            changed.update(owner for owner, spotter in self._spotters.items() if spotter.unread)
            for owner in changed:
                spotter = self._spotters.setdefault(owner, Spotter(partial(self._token_ids, owner)))
                mine = (chunk_id for of, chunk_id in places.values() if of == owner)
                spotter.update(chunk_id for chunk_id in mine if chunk_id not in self._foreign[1])
        self._places, self._revision = places, revision

    def _place(self, key: bytes) -> tuple[str, bytes]:
        entry = self.store.file_at(key)
        assert entry is not None  # `key` is of the same view
        owner, _, chunk_id = entry.path.rpartition("/")
        return owner, bytes.fromhex(chunk_id)

    def _token_ids(self, owner: str, chunk_id: bytes) -> Sequence[int]:
        with suppress(DamagedError):
            info = self.store.chunk_info(chunk_id)
            if info is not None:
                if self.wanted(owner, info.token_ids).chunk_id == chunk_id:
                    return info.token_ids
                self._foreign[1].add(chunk_id)
        return ()

    def passage(self, chunk_id: bytes) -> Passage:
        return Passage(chunk_id, f"learned:{chunk_id.hex()[:12]}", 0, 0, 0)

    def wanted(self, owner: str, ids: Ids) -> ChunkSpec:
        return replace(self.identity, namespace=f"{owner}, {self._decoder.loaded.arithmetic}").wanted(ids)

    def put(self, owner: str, chunk: ChunkSpec, text: str) -> None:
        """Compute and store a passage of an owner. Raises NoSpaceError, StoreLockedError."""
        source = f"{owner}/{chunk.chunk_id.hex()}"
        with self.store.writer(_LOCK_WAIT, self._budget) as writer:  # before anything is computed
            if not self.store.manifest():
                writer.set_manifest(self.identity.to_manifest())
            self._make_room(writer, self._decoder.kv_bytes(len(chunk.ids)))
        (prefilled,) = make(self._decoder, self._lead_in(), [chunk])  # other answers go on meanwhile: no writer waits
        with self.store.writer(_LOCK_WAIT, self._budget) as writer:
            writer.put_chunk(
                prefilled.chunk_id, prefilled.info, prefilled.level, prefilled.layers, replace=True, origin=HERE
            )
            ref = ChunkRef(chunk.chunk_id, 0, len(text), len(chunk.ids))
            document = DocumentEntry(source, "text", text, (ref,))
            writer.commit_file(FileEntry(source, len(text), 0, "", "", (source,)), [document])
        self._follow()  # in the time of who has it learned, not of who asks next

    def _lead_in(self) -> LeadIns:
        if self._lead_ins is None or self._lead_ins[0] is not self.identity:
            self._lead_ins = self.identity, lead_ins_of(self.identity, self._decoder)
        return self._lead_ins[1]

    def _make_room(self, writer: Writer, need: int) -> None:
        """Evict the least recently used passages until so many bytes fit into the budget. Raises NoSpaceError."""
        if _SPARE * need > (_SPARE - 1) * self._budget:
            raise NoSpaceError(f"a passage has {megabytes(need)} of KV", "start with a larger --learn-budget")
        free_bytes = self._budget - folder_bytes(self.store.path) + self.store.environment.free_bytes()
        spare = self._budget // _SPARE if need else 0
        if free_bytes - spare < need:
            scores, evicted = self.store.warmth(), set[bytes]()
            for chunk_id, when in self.store.added().items():
                scores[chunk_id] = max(scores.get(chunk_id, 0.0), when)
            for chunk_id in sorted(self.store.ids_here(), key=lambda chunk_id: (scores.get(chunk_id, 0.0), chunk_id)):
                if free_bytes - 2 * spare >= need:
                    break
                evicted.add(chunk_id)
                free_bytes += sum(self.store.sizes_here(chunk_id).values())
            self._drop(writer, evicted)
        if folder_bytes(self.store.path) > self._budget:  # which is smaller now than at an earlier start
            writer.compact()

    def trim(self, owners: Collection[str] | None) -> None:
        """Drop what exceeds the budget, and the passages of all owners but these, unless none of these has any: they
        are then of a key file that is mistyped or missing. Raises KvtoolError."""
        self._follow()  # what takes long, before the lock
        due = self.store.path.with_suffix(".compact")  # until the text of dropped passages has left the disk
        with self.store.writer(_TRIM_WAIT, self._budget) as writer:
            self._follow()
            stay = {owner for owner, _ in self._places.values()}.intersection(owners or ())
            others = {chunk_id for owner, chunk_id in self._places.values() if owner not in stay | {EVERYBODY}}
            if stay <= {EVERYBODY}:
                others.clear()
            if others:
                due.touch()
            self._drop(writer, others)
            writer.collect()  # chunks whose document a killed server had removed
            if due.exists():
                writer.compact()
                due.unlink()
            self._make_room(writer, 0)

    def forget(self, chunk_ids: Set[bytes]) -> None:
        """Drop passages whose records cannot be read; they are learned again. While another server is writing, none is
        dropped: the next answer that reads them tries again. Raises KvtoolError."""
        with suppress(StoreLockedError), self.store.writer(_LOCK_WAIT) as writer:
            self._drop(writer, chunk_ids)

    def _drop(self, writer: Writer, chunk_ids: Set[bytes]) -> None:
        self._follow()
        places = self._places.values()
        writer.remove_documents(f"{owner}/{chunk_id.hex()}" for owner, chunk_id in places if chunk_id in chunk_ids)
        writer.drop_chunks(chunk_ids)
