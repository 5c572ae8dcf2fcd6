"""A shared tier behind a local store: what it describes is here, its KV comes when it is asked for, and stays."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from kvtool.core.cache.backend import Ahead, KVRead, Wanted
from kvtool.core.cache.chunks import read_record
from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.layout import writer_lock
from kvtool.core.cache.record import aligned
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import level_of
from kvtool.core.common.types import Warn
from kvtool.core.errors import (
    DamagedError,
    KvtoolError,
    RemoteError,
    StoreLockedError,
)
from kvtool.core.model.preemption import run_pending
from kvtool.core.remote.arrivals import Arrivals
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.entries import Chunk, Level, digest_of, records_wanted
from kvtool.core.remote.front import bytes_of, make_room, plan_room
from kvtool.core.remote.limits import MOST_BYTES
from kvtool.core.remote.offers import Offers
from kvtool.core.remote.survey import base_of
from kvtool.core.upkeep.size_report import LOW_WATER

Place = tuple[bytes, str]  # chunk id, level
_Record = tuple[Place, int]  # of a layer
_Fetched = tuple[bytes, ChunkInfo, str, list[bytes]]  # whole: chunk id, description, level, records
CATALOGUE = "remote/catalogue"  # the one that was taken over last, or its root, beside the local store


class Tier:
    """A shared tier as the :class:`kvtool.core.cache.backend.Link` of a local store.

    Documents and chunks are those of the catalogue; KV of a chunk is asked for when its first layer is read,
    taken layer by layer, checked, and written into the local store after the answer. Layers of it that no row sees are
    asked for after the answer, too: it is kept whole or not at all. When the tier stops answering it is not asked
    again: what is missing is a miss like any other, with a notice.

    Attributes
    ----------
    timeout : seconds to wait for a value.
    """

    def __init__(self, store: Store, blobs: Blobs, offers: Offers, digest: str, timeout: float, warn: Warn) -> None:
        self._store, self._blobs, self._warn, self.timeout = store, blobs, warn, timeout
        self._there: Offers | None = offers  # None: the tier is gone
        self._digest = digest  # of the catalogue that they are of
        self._fetched: dict[Place, dict[int, bytes]] = {}
        self._read: dict[Place, set[int]] = {}  # layers, of what is read by passes that said which
        self._lost: set[Place] = set()  # of which something came damaged, or not at all
        self._fetching = threading.Lock()
        self._arrivals: Arrivals | None = None
        self._coming = deque[_Record]()  # what was asked for and has not come

    @property
    def url(self) -> str:
        """Return the URL of the shared store, without its secrets."""
        return self._blobs.url

    # ---- what there is ----

    def offers(self, chunk_id: bytes) -> Mapping[str, Level]:
        """The levels that the tier has of a chunk; none of them when it is gone."""
        chunk = self._chunk(chunk_id)
        return chunk.levels if chunk is not None else {}

    def _chunk(self, chunk_id: bytes) -> Chunk | None:
        try:
            return self._there.get(chunk_id.hex()) if self._there is not None else None
        except (RemoteError, DamagedError) as error:
            self.give_up(error)
            return None

    def is_here(self, chunk_id: bytes, level: str) -> bool:
        """Return True if a read of a chunk at a level needs no fetching."""
        chunk = self._chunk(chunk_id)
        fetched = self._fetched.get((chunk_id, level), {})
        return level in self._store.sizes_here(chunk_id) or (chunk is not None and len(fetched) == chunk.layers)

    def wanted(self, chunk_id: bytes, level: str) -> list[Wanted]:
        """Return the requests for a chunk's records at a level, by layer; empty if the level is not offered."""
        chunk = self._chunk(chunk_id)
        return records_wanted(chunk_id.hex(), chunk, level) if chunk is not None and level in chunk.levels else []

    # ---- reading ----

    def complete(
        self,
        reads: list[KVRead | KvtoolError | None],
        chunk_ids: Sequence[bytes],
        level: str,
        layer: int,
        before: Callable[[int], None],
        ahead: Ahead = None,
    ) -> None:
        """Fetch what a read of the local store did not find or found damaged, and put it into its place."""
        missing = [number for number, read in enumerate(reads) if read is None or isinstance(read, KvtoolError)]
        missing = [number for number in missing if self._has(chunk_ids[number], level, layer)]
        if not missing:
            return
        try:
            for number in missing:
                before(number)
            layers = {chunk_ids[number]: None if ahead is None else ahead[number] for number in missing}
            self._fetch(layers, level, layer)
            why: KvtoolError = DamagedError("its record in the shared store is damaged or lost")
        except RemoteError as error:
            why = error
        for number in missing:
            reads[number] = self._taken(chunk_ids[number], level, layer) or why

    def _has(self, chunk_id: bytes, level: str, layer: int) -> bool:
        return layer < len(self.wanted(chunk_id, level)) or (chunk_id, level) in self._fetched

    def _fetch(self, chunks: Mapping[bytes, Collection[int] | None], level: str, layer: int) -> None:
        """Take a layer of some chunks. Who reads one reads the next ones, too, or those that are said: they are asked
        for with it.

        A stream that has failed is not waited for once more, by whoever reads beside the one that it failed."""
        with self._fetching:
            for chunk_id, layers in chunks.items():
                if layers is not None:
                    self._read.setdefault((chunk_id, level), set()).update(layers)
            places = [(chunk_id, level) for chunk_id in chunks]
            lacking = {(place, layer) for place in places if layer not in self._fetched.get(place, {})}
            if not lacking:
                return
            if self._there is None:
                raise RemoteError("the shared store is gone")
            try:
                first = lacking.difference(self._coming)
                self._take({place: self._from(place, layer) for place in places if (place, layer) in first}, lacking)
            except RemoteError as error:
                self.give_up(error)
                raise

    def _from(self, place: Place, layer: int) -> set[int]:
        """A layer of a chunk, and those behind it that are read."""
        behind = range(layer, len(self.wanted(*place)))
        return {layer, *(self._read[place].intersection(behind) if place in self._read else behind)}

    def _take(self, asked: Mapping[Place, Collection[int]], lacking: set[_Record]) -> None:
        """Ask for layers of some chunks, and take what comes until nothing is lacking."""
        arrivals = self._arrivals = self._arrivals or self.arrivals()
        try:
            self._ask(arrivals, asked)
            while lacking:
                place, number = self._coming.popleft()
                if not self.keep(place, number, arrivals.take(self.timeout).value):
                    self._lost.add(place)
                lacking.discard((place, number))
        except BaseException:  # Ctrl-C, too: nobody knows which of them comes next
            arrivals.close()
            self._arrivals = None
            self._coming.clear()
            raise

    def _ask(self, arrivals: Arrivals, layers: Mapping[Place, Collection[int]]) -> None:
        """Ask for what is not here of some layers of some chunks, layer by layer of all of them."""
        asked, coming = list[tuple[int, Place, Wanted]](), {*self._coming}
        for place, numbers in layers.items():
            wanted = self.wanted(*place)
            if not wanted:
                raise RemoteError("the shared store is gone")
            lacking = {*numbers} - self._fetched.get(place, {}).keys()
            asked += [(number, place, wanted[number]) for number in lacking if (place, number) not in coming]
        asked.sort(key=lambda row: row[0])  # chunks stay in the order given
        self._coming += [(place, number) for number, place, _ in asked]
        arrivals.ask([wanted for _, _, wanted in asked])

    def _taken(self, chunk_id: bytes, level: str, layer: int) -> KVRead | KvtoolError | None:
        value = self._fetched.get((chunk_id, level), {}).get(layer)
        if value is None:
            return None
        copy = aligned(len(value))
        copy[:] = value
        return read_record(chunk_id, level, layer, copy)

    # ---- streaming (core/streaming) ----

    def arrivals(self) -> Arrivals:
        """A stream of values of the tier."""
        return Arrivals(self._blobs)

    def keep(self, place: Place, layer: int, value: bytes | None) -> bool:
        """Hold a record that came, to be read now and written afterwards. False: it is missing, damaged, too large."""
        if value is None or not isinstance(read_record(place[0], place[1], layer, memoryview(value)), tuple):
            return False
        held = self._fetched.setdefault(place, {})
        others = sum(len(record) for number, record in held.items() if number != layer)
        offer = self.offers(place[0]).get(place[1])
        if others + len(value) > (offer.size if offer is not None else MOST_BYTES):
            return False
        held[layer] = value
        return True

    def give_up(self, error: KvtoolError) -> None:
        """Ask the tier no more."""
        if self._there is not None:
            self._there = None
            self._warn(f"{error.message}: what is not here is computed", error.hint)

    # ---- afterwards ----

    def keep_fetched(self) -> None:
        """Write chunks whose layers have all come; a store that is full or locked goes on fetching."""
        if self._fetched or self._store.notes_are_long:  # which a writer takes in when it ends
            try:
                self._fetch_rest()
                self.write_fetched()
            except KvtoolError as error:  # locked, full, read-only
                self._warn(f"what was fetched is not kept: {error.message}", error.hint)

    def _fetch_rest(self) -> None:
        """Fetch the layers that no row saw, of chunks that will find room here, so that they are whole.

        Half a chunk would have to be told from a whole one by all that read a store, and be whole by the time that
        another question, whose rows see more of it, is asked. What is not kept would be fetched by every question.
        """
        rest = self._rest()
        if not rest or self._there is None or self._store.read_only or not self._fetching.acquire(blocking=False):
            return  # who still waits for the tier has given up on a slow one, which is asked for no more
        try:
            with writer_lock(self._store.path, 0.0):
                pass  # where another process writes, which may take hours, nothing will be kept
            self._take(rest, set())
            while self._coming:
                self._take({}, {self._coming[0]})
                run_pending()  # a server's other answers go on
        except StoreLockedError:
            return  # `write_fetched` tells it
        except RemoteError as error:
            self.give_up(error)
        finally:
            self._fetching.release()
        if lost := len(self._lost & rest.keys()):
            text = f"{lost} chunk(s) are not kept here: what no row saw of them is damaged in the shared store"
            self._warn(text, "push again with --verify")

    def _rest(self) -> dict[Place, set[int]]:
        """Return the layers still missing of chunks that a question has read in part, for the chunks that will fit."""
        lacking = {
            place: {*range(len(self.wanted(*place)))} - layers.keys()
            for place, layers in self._fetched.items()
            if place in self._read and place not in self._lost
        }
        if not any(lacking.values()):
            return {}
        sizes = Counter[bytes]()
        for place in self._fetched:
            sizes[place[0]] += self.bytes_here(*place)
        kept = plan_room(self._store, sizes).kept
        return {place: layers for place, layers in lacking.items() if layers and place[0] in kept}

    def bytes_here(self, chunk_id: bytes, level: str) -> int:
        """Return the bytes that a chunk at a level will need in the local store; 0 if the level is not offered."""
        layers = len(self.wanted(chunk_id, level))
        return layers * bytes_of(-(-self.offers(chunk_id)[level].size // layers)) if layers else 0

    def write_fetched(self, lock_wait: float = 0.0, spare: float = 1 - LOW_WATER) -> set[Place]:
        """Write chunks whose layers have all come, as far as there is room for them (:func:`make_room`), and forget all
        that was fetched. Returns what was written. Raises as `Store.writer` does, and NoSpaceError."""
        whole, written = self._whole(), set[Place]()
        self._fetched, self._read, self._lost = {}, {}, set()
        with self._store.writer(lock_wait) as writer:
            kept, mine = make_room(self._store, writer, _bytes_by_chunk(whole), spare), self._is_in_force()
            for chunk_id, info, level, records in whole:
                if chunk_id not in kept or (level_of(level).nested and not mine):
                    continue  # another process has taken a newer catalogue over: it may refine what that has dropped
                with suppress(ValueError):  # of another length than its description: a hole in the answer
                    writer.put_chunk(chunk_id, info, level, records)
                    written.add((chunk_id, level))
        return written

    def _whole(self) -> list[_Fetched]:
        """Levels of chunks of which all layers, and what they refine, have come or are here; the coarser first. That
        is asked of the records: the tier may be gone by now, with all that it told."""
        whole = dict[Place, _Fetched]()
        for (chunk_id, level), layers in sorted(self._fetched.items(), key=lambda row: level_of(row[0][1]).bits):
            with suppress(DamagedError):  # its description: the next catalogue brings it again
                info = self._store.chunk_info(chunk_id)
                if info is None or len(layers) != info.layers:
                    continue
                base = base_of(chunk_id, level, layers[0]) if level_of(level).nested else None
                if base is None or (chunk_id, base) in whole or base in self._store.sizes_here(chunk_id):
                    records = [layers[layer] for layer in range(info.layers)]
                    whole[chunk_id, level] = chunk_id, info, level, records
        return [*whole.values()]

    def _is_in_force(self) -> bool:
        """Return True if the local store still describes the catalogue that was fetched by. The writer lock is held."""
        with suppress(OSError):
            return digest_of(self._store.side_file(CATALOGUE).read_bytes()) == self._digest
        return False

    def close(self) -> None:
        """Let go of the tier."""
        if self._arrivals is not None:
            self._arrivals.close()
        self._blobs.close()


def _bytes_by_chunk(fetched: Iterable[_Fetched]) -> Counter[bytes]:
    sizes = Counter[bytes]()
    for chunk_id, _, _, records in fetched:
        sizes[chunk_id] += sum(bytes_of(len(record)) for record in records)
    return sizes
