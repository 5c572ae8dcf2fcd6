"""A shared tier behind a local store: what it describes is here, its KV comes when it is asked for, and stays."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvtool.core.cache.buffers import aligned
from kvtool.core.cache.layout import atomic_write
from kvtool.core.cache.store import KVRead, Store, read_record
from kvtool.core.codec.levels import LOSSY
from kvtool.core.common.places import cache_dir
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.common.urls import place_of
from kvtool.core.errors import (
    DamagedError,
    KvtoolError,
    NoSpaceError,
    RemoteError,
    StoreFormatError,
    StoreLockedError,
)
from kvtool.core.remote.arrivals import Arrivals
from kvtool.core.remote.blobs import TIMEOUT, Blobs
from kvtool.core.remote.catalogue import Catalogue, Chunk, digest_of, kv_names
from kvtool.core.remote.front import bytes_of, default_budget, make_room
from kvtool.core.remote.limits import MOST_BYTES
from kvtool.core.remote.mirror import drop_stale, read_before
from kvtool.core.remote.pull import adopt
from kvtool.core.remote.reading import check_same_identity, read_catalogue
from kvtool.core.remote.urls import open_blobs

Place = tuple[bytes, str]  # chunk id, level
_ADOPTED = "remote/adopted.json"
_CATALOGUE = "remote/catalogue"  # the one that was taken over last
_MOST_TOLD = 10  # damages, one by one
_RULES = 2  # by which it was taken over: a store that an older kvtool filled is brought up to date once more


class Tier(Store):
    """A local store that fetches what it lacks. Use :meth:`open_url`.

    Documents and chunks are those of the catalogue; KV is fetched layer by layer as it is read, checked, and written
    into the local store after the answer. When the tier stops answering it is not asked again: what is missing is a
    miss like any other, with a notice.

    Attributes
    ----------
    timeout : seconds to wait for a value.
    """

    _blobs: Blobs | None = None
    _there: Catalogue | None = None
    _digest = ""  # of the catalogue that was found
    _warn: Warn = staticmethod(warn_nobody)
    timeout = TIMEOUT

    @classmethod
    def open_url(cls, url: str, *, timeout: float = TIMEOUT, lock_wait: float = 0.0, warn: Warn = warn_nobody) -> Tier:
        """The tier of a URL, with its local store.

        Parameters
        ----------
        timeout : seconds to wait for a value.

        Raises
        ------
        RemoteError : it does not answer, and nothing of it is here yet.
        StoreNotFoundError : nothing was pushed there.
        """
        blobs, place = open_blobs(url, timeout), local_place(url)
        try:
            there = read_catalogue(blobs)
        except (RemoteError, DamagedError) as error:
            blobs.close()
            return cls._without(place, warn, error)
        Store.create_or_open(place).close()
        tier = cls.open(place)
        try:
            tier._attach_to(blobs, there, timeout, lock_wait, warn)
        except BaseException:
            tier.close()
            raise
        finally:
            if tier._blobs is None:
                blobs.close()
        return tier

    @classmethod
    def _without(cls, place: Path, warn: Warn, error: KvtoolError) -> Tier:
        """What is here already, if anything is."""
        with suppress(KvtoolError):
            tier = cls.open(place)
            if tier.manifest():
                tier._warn = warn
                warn(f"{error.message}: only what is here already is used", error.hint)
                return tier
            tier.close()
        raise error

    def _attach_to(self, blobs: Blobs, there: Catalogue, timeout: float, lock_wait: float, warn: Warn) -> None:
        self._warn, self.timeout = warn, timeout
        self._fetched: dict[Place, dict[int, bytes]] = {}
        self._fetching = threading.Lock()
        self._arrivals: Arrivals | None = None
        mine = self.manifest()
        try:
            if mine:
                check_same_identity(mine.get("identity", {}), there.identity, blobs.url)
            self._adopt(blobs, there, lock_wait)
        except StoreFormatError as error:
            warn(f"{error.message}: only what is here already is used", f"start anew: remove {self.path}")
            return
        except (StoreLockedError, NoSpaceError) as error:
            if not self.manifest():
                raise
            warn(f"what is new at {blobs.url} was not taken over: {error.message}", "")
        except RemoteError as error:
            if not self.manifest():
                raise
            warn(f"{error.message}: only what is here already is used", error.hint)
            return
        self._blobs, self._there = blobs, there
        if any(level in LOSSY and level not in one.makers for one in there.chunks.values() for level in one.levels):
            text = f"{blobs.url} does not say which profile its lossy records are of: --level auto leaves them alone"
            warn(text, "push to it again")

    def _adopt(self, blobs: Blobs, there: Catalogue, lock_wait: float) -> None:
        """Take over what the catalogue describes, once for each catalogue."""
        packed, mark = there.pack(), self.side_file(_ADOPTED)
        self._digest = digest_of(packed)
        done = json.dumps({"catalogue": self._digest, "rules": _RULES}).encode()
        with suppress(OSError):
            if mark.read_bytes() == done:
                return
        last = self.side_file(_CATALOGUE)
        with self.writer(lock_wait) as writer:
            report = adopt(self, writer, blobs, there, levels=(), delete=True, timeout=self.timeout, mirror=True)
            if self.budget() is None and not last.exists():  # later on it is what its owner wants
                writer.set_budget(default_budget(self.path))
            drop_stale(self, writer, there, read_before(last))
            atomic_write(last, packed)
        for damage in report.damaged[:_MOST_TOLD]:
            self._warn(f"{damage['what']}: {damage['reason']}", "push again with --verify")
        if len(report.damaged) > _MOST_TOLD:
            self._warn(f"{len(report.damaged) - _MOST_TOLD} more are damaged or missing there", "")
        if not report.damaged:
            atomic_write(mark, done)

    # ---- what there is ----

    def level_sizes(self, chunk_id: bytes) -> dict[str, int]:
        """Of levels that are here or there."""
        chunk = self.shared(chunk_id)
        there = {level: one.size for level, one in chunk.levels.items()} if chunk is not None else {}
        return dict(sorted((there | super().level_sizes(chunk_id)).items()))

    def made_with(self, chunk_id: bytes, level: str) -> str | None:
        """As the record here says, else the catalogue; nothing is fetched to find out."""
        found, chunk = super().made_with(chunk_id, level), self.shared(chunk_id)
        if found is None and chunk is not None and level in chunk.levels:
            return chunk.levels[level].maker
        return found

    def has_chunk(self, chunk_id: bytes) -> bool:
        """Whether it is whole here or there."""
        return super().has_chunk(chunk_id) or bool(self.level_sizes(chunk_id))

    def shared(self, chunk_id: bytes) -> Chunk | None:
        """What the tier has of a chunk; None: nothing, or it is gone."""
        if self._there is None or self._blobs is None:
            return None
        return self._there.chunks.get(chunk_id.hex())

    def stated(self, chunk_id: bytes, level: str) -> int:
        """Bytes that a chunk's records at a level have in all, as the catalogue says; no more of them is taken."""
        chunk = self.shared(chunk_id)
        return chunk.levels[level].size if chunk is not None and level in chunk.levels else MOST_BYTES

    def is_here(self, chunk_id: bytes, level: str) -> bool:
        """Whether all of a chunk at a level needs no fetching."""
        chunk = self.shared(chunk_id)
        fetched = self._fetched.get((chunk_id, level), {}) if self._blobs is not None else {}
        return level in super().level_sizes(chunk_id) or (chunk is not None and len(fetched) == chunk.layers)

    # ---- reading ----

    def read_layer(
        self, chunk_ids: Sequence[bytes], level: str, layer: int, before: Callable[[int], None] = lambda number: None
    ) -> list[KVRead | KvtoolError | None]:
        """One layer of many chunks, from here, else from there. See Store."""
        found = super().read_layer(chunk_ids, level, layer, before)
        missing = [number for number, one in enumerate(found) if one is None or isinstance(one, KvtoolError)]
        missing = [number for number in missing if self._offers(chunk_ids[number], level, layer)]
        if missing:
            try:
                for number in missing:
                    before(number)
                self._fetch([chunk_ids[number] for number in missing], level, layer)
                why: KvtoolError = DamagedError("its record in the shared store is damaged or lost")
            except RemoteError as error:
                self.give_up(error)
                why = error
            for number in missing:
                found[number] = self._taken(chunk_ids[number], level, layer) or why
        return found

    def _offers(self, chunk_id: bytes, level: str, layer: int) -> bool:
        chunk = self.shared(chunk_id)
        return (chunk is not None and level in chunk.levels and layer < chunk.layers) or (
            self._blobs is not None and (chunk_id, level) in self._fetched
        )

    def _fetch(self, chunk_ids: Iterable[bytes], level: str, layer: int) -> None:
        with self._fetching:
            wanted = [one for one in chunk_ids if layer not in self._fetched.get((one, level), {})]
            asked = [(self._name(chunk_id, level, layer), self.stated(chunk_id, level)) for chunk_id in wanted]
            if not asked:
                return
            arrivals = self._arrivals = self._arrivals or self.arrivals()
            for name, most in asked:
                arrivals.ask([name], most)
            for chunk_id in wanted:
                self.keep((chunk_id, level), layer, arrivals.take(self.timeout).value)

    def _name(self, chunk_id: bytes, level: str, layer: int) -> str:
        chunk = self.shared(chunk_id)
        if chunk is None:
            raise RemoteError("the shared store is gone")
        return kv_names(chunk_id.hex(), chunk, level)[layer]

    def _taken(self, chunk_id: bytes, level: str, layer: int) -> KVRead | KvtoolError | None:
        value = self._fetched.get((chunk_id, level), {}).get(layer)
        if value is None:
            return None
        copy = aligned(len(value))
        copy[:] = value
        return read_record(chunk_id, level, layer, copy)

    # ---- streaming (core/streaming) ----

    def arrivals(self) -> Arrivals:
        """A stream of values of the tier; raises RemoteError where it is gone."""
        if self._blobs is None:
            raise RemoteError("the shared store is gone")
        return Arrivals(self._blobs)

    def keep(self, place: Place, layer: int, value: bytes | None) -> bool:
        """Hold a record that came, to be read now and written afterwards. False: it is missing, damaged, too large."""
        if value is None or not isinstance(read_record(place[0], place[1], layer, memoryview(value)), tuple):
            return False
        held = self._fetched.setdefault(place, {})
        others = sum(len(one) for number, one in held.items() if number != layer)
        if others + len(value) > self.stated(*place):
            return False
        held[layer] = value
        return True

    def give_up(self, error: KvtoolError) -> None:
        """Ask the tier no more."""
        if self._there is not None:
            self._there = None
            self._warn(f"{error.message}: what is not here is computed", error.hint)

    # ---- afterwards ----

    def note_access(self, chunk_ids: Sequence[bytes], missed: int = 0) -> None:
        """As for any store; and what was fetched for the answer is written."""
        super().note_access(chunk_ids, missed)
        self._keep_fetched()

    def _keep_fetched(self) -> None:
        """Write chunks whose layers have all come; a store that is full or locked goes on fetching."""
        if self._blobs is None or not self._fetched:
            return
        whole = []
        for (chunk_id, level), layers in self._fetched.items():
            with suppress(DamagedError):  # its description: the next catalogue brings it again
                info = self.chunk_info(chunk_id)
                if info is not None and len(layers) == info.layers:
                    whole.append((chunk_id, info, level, [layers[layer] for layer in range(info.layers)]))
        if whole:
            try:
                with self.writer() as writer:
                    records = [record for chunk in whole for record in chunk[3]]
                    make_room(self, writer, super().level_sizes, sum(map(bytes_of, records)))
                    mine = self._is_in_force()
                    for chunk in whole:
                        if mine or chunk[2] not in LOSSY:  # else it may refine what another process has dropped
                            with suppress(ValueError):  # of another length than its description: a hole in the answer
                                writer.put_chunk(*chunk)
            except KvtoolError as error:  # locked, full, read-only
                self._warn(f"what was fetched is not kept: {error.message}", error.hint)
        self._fetched = {}

    def _is_in_force(self) -> bool:
        """Whether the catalogue that was taken over last is the one that was fetched by. Writer lock held."""
        with suppress(OSError):
            return digest_of(self.side_file(_CATALOGUE).read_bytes()) == self._digest
        return False

    def close(self) -> None:
        """As for any store; and the tier is let go of."""
        if self._blobs is not None:
            if self._arrivals is not None:
                self._arrivals.close()
            self._blobs.close()
        super().close()


def local_place(url: str) -> Path:
    """The folder of the local store in front of a URL; what is in it can be fetched again."""
    digest = hashlib.blake2b(place_of(url).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return cache_dir() / "remote" / digest


def open_store(
    place: Path | str,
    *,
    timeout: float = TIMEOUT,
    lock_wait: float = 0.0,
    warn: Warn = warn_nobody,
) -> Store:
    """The store at a folder or a URL. Raises as `Store.open` and `Tier.open_url` do."""
    if isinstance(place, Path):
        return Store.open(place)
    return Tier.open_url(place, timeout=timeout, lock_wait=lock_wait, warn=warn)
