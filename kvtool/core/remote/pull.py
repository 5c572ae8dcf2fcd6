"""Shared tier → local store: what is missing here, each value checked before it is taken in."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtool.core.cache import keys
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import DamagedError
from kvtool.core.remote import local
from kvtool.core.remote.arrivals import Arrivals
from kvtool.core.remote.blobs import TIMEOUT, Blobs
from kvtool.core.remote.catalogue import Catalogue, Chunk, File, chunk_name, digest_of, file_name, kv_names
from kvtool.core.remote.push import push
from kvtool.core.remote.reading import check_same_identity, read_catalogue
from kvtool.core.remote.report import Events, TransferReport
from kvtool.core.remote.state import join_codec

_AHEAD = 4  # groups that are asked for before the first is there

Group = tuple[str, Sequence[str]]  # what it is of, names of blobs


def pull(
    path: Path,
    blobs: Blobs,
    *,
    levels: Sequence[str] | None = None,
    delete: bool = False,
    newer: bool = False,
    lock_wait: float = 0.0,
    max_size: int | None = None,
    timeout: float = TIMEOUT,
    events: Events | None = None,
) -> TransferReport:
    """Bring a store up to date with a tier; it is made where there is none. Run again to resume.

    Parameters
    ----------
    levels : of the KV that is fetched, with the coarser ones that they refine; None: all; none: descriptions only.
    delete : forget the files that the tier does not have.
    newer : of a file that both have in two versions take the one changed last; else the tier's.
    timeout : seconds to wait for a value.

    Raises
    ------
    StoreNotFoundError : nothing was pushed there.
    RemoteError : the tier does not answer. What came stays.
    StoreFormatError : the store is of another model.
    """
    there = read_catalogue(blobs)
    with Store.create_or_open(path) as store, store.writer(lock_wait, max_size) as writer:
        return adopt(store, writer, blobs, there, levels, delete, newer, timeout, events)


def adopt(
    store: Store,
    writer: Writer,
    blobs: Blobs,
    there: Catalogue,
    levels: Sequence[str] | None,
    delete: bool = False,
    newer: bool = False,
    timeout: float = TIMEOUT,
    events: Events | None = None,
    mirror: bool = False,
) -> TransferReport:
    """The same with a catalogue and a writer at hand.

    Parameters
    ----------
    mirror : the store has nothing of its own: what the tier knows of codec levels and lead-in replaces what is here.
    """
    started = time.perf_counter()
    job = _Pull(store, writer, blobs, TransferReport("pull", blobs.url), timeout, events or Events())
    job.run(there, levels, delete, newer, mirror)
    job.report.seconds = time.perf_counter() - started
    return job.report


def sync(path: Path, blobs: Blobs, *, lock_wait: float = 0.0, events: Events | None = None) -> list[TransferReport]:
    """Pull, then push; of a file that both have in two versions the one changed last stays. Raises as both do."""
    pulled = pull(path, blobs, newer=True, lock_wait=lock_wait, events=events)
    with Store.open(path) as store:
        return [pulled, push(store, blobs, newer=True, events=events)]


class _Pull:
    def __init__(
        self, store: Store, writer: Writer, blobs: Blobs, report: TransferReport, timeout: float, events: Events
    ) -> None:
        self.store, self.writer, self.blobs = store, writer, blobs
        self.report, self.timeout, self.events = report, timeout, events

    def run(
        self, there: Catalogue, levels: Sequence[str] | None, delete: bool, newer: bool, mirror: bool = False
    ) -> None:
        mine = self.store.manifest()
        if mine:
            check_same_identity(there.identity, mine.get("identity", {}), str(self.store.path))
        self._manifest(there, new=not mine)
        self._profiles(there)  # before the state that names them
        self._state(there, mirror)
        self._describe(there)
        self._records(there, levels)
        self.writer.flush()
        self._files(there, newer)
        if delete:
            self._forget(there)

    # ---- fetching ----

    def _fetched(self, groups: Iterable[Group]) -> Iterator[tuple[str, list[bytes]]]:
        """Groups of values that are whole; of a damaged or missing one it is noted, and its group left out."""
        arrivals = Arrivals(self.blobs)
        waiting: list[Group] = []
        try:
            for group in groups:
                arrivals.ask(group[1])
                waiting.append(group)
                if len(waiting) > _AHEAD:
                    yield from self._taken(arrivals, waiting.pop(0))
            for group in waiting:
                yield from self._taken(arrivals, group)
        finally:
            arrivals.close()

    def _taken(self, arrivals: Arrivals, group: Group) -> Iterator[tuple[str, list[bytes]]]:
        what, names = group
        values = [arrivals.take(self.timeout).value for _ in names]
        for name, value in zip(names, values, strict=True):
            if value is None or not local.is_sound(name, value):
                self.report.note_damage(what, f"{name} is {'missing' if value is None else 'damaged'} there")
                return
        whole = [value for value in values if value is not None]
        self.report.bytes += sum(map(len, whole))
        yield what, whole

    # ---- the parts ----

    def _manifest(self, there: Catalogue, new: bool) -> None:
        """What the tier says of its model; a store that knows its own keeps it."""
        if new:
            found = self._metas(there, ["manifest"])
            if not found:
                raise DamagedError(f"what {self.blobs.url} says of its model is damaged or lost", "push again")
            self.writer.set_manifest(found["manifest"])

    def _state(self, there: Catalogue, mirror: bool) -> None:
        """What was measured of the codec levels, and which lead-in is the learned one: the tier's in a mirror; else
        the store's own, and what the tier knows besides."""
        put = {"codec": self.writer.set_codec_state, "lead-in": self.writer.set_lead_in_state}
        own = {name: self._own_state(name) for name in put}
        differ = [name for name in put if there.meta.get(name) != digest_of(local.sealed_meta(name, own[name]))]
        for name, theirs in self._metas(there, differ).items():
            joined = theirs
            if not mirror:
                joined = join_codec(own[name], theirs) if name == "codec" else own[name] or theirs
            if joined != own[name]:
                put[name](joined)

    def _own_state(self, name: str) -> dict[str, Any]:
        try:
            return self.store.codec_state() if name == "codec" else self.store.lead_in_state()
        except DamagedError:  # replaced by the tier's
            return {}

    def _metas(self, there: Catalogue, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        groups = ((name, [f"meta/{name}-{there.meta[name]}"]) for name in names if name in there.meta)
        return {name: local.open_meta(name, value) for name, (value,) in self._fetched(groups)}

    def _profiles(self, there: Catalogue) -> None:
        known = {digest.hex() for digest in self.store.profile_digests()}
        groups = ((digest, [f"profile/{digest}"]) for digest in there.profiles if digest not in known)
        for digest, (value,) in self._fetched(groups):
            self.writer.add_profile(bytes.fromhex(digest), local.open_profile(digest, value))

    def _describe(self, there: Catalogue) -> None:
        known = {chunk.hex() for chunk in self.store.chunk_ids()}
        groups = ((key, [chunk_name(key, one)]) for key, one in there.chunks.items() if key not in known)
        infos = {}
        for key, (value,) in self._fetched(groups):
            infos[bytes.fromhex(key)] = local.open_chunk(bytes.fromhex(key), value)
            if len(infos) == 1024:
                self.writer.describe(infos)
                infos = {}
        self.writer.describe(infos)

    def _records(self, there: Catalogue, levels: Sequence[str] | None) -> None:
        wanted = []
        for key, chunk in there.chunks.items():
            stored = self.store.levels(bytes.fromhex(key))
            asked = _with_bases(chunk, chunk.levels if levels is None else levels)
            self.report.chunks.there += sum(level in stored for level in asked)
            wanted += [(key, level) for level in asked if level not in stored]
        self.events.total(len(wanted))
        groups = ((f"{key} {level}", kv_names(key, there.chunks[key], level)) for key, level in wanted)
        for what, records in self._fetched(groups):
            key, level = what.split()
            chunk_id = bytes.fromhex(key)
            info = self.store.chunk_info(chunk_id)
            if info is None:
                self.report.note_damage(what, "its description did not come")
            else:
                try:
                    self.writer.put_chunk(chunk_id, info, level, records)
                    self.report.chunks.moved += 1
                except ValueError as error:
                    self.report.note_damage(what, str(error))
            self.events.advance(1)

    def _files(self, there: Catalogue, newer: bool) -> None:
        mine = self._own_files()
        wanted = [key for key, one in there.files.items() if _is_wanted(one, mine.get(key), newer)]
        self.report.files.there = len(there.files) - len(wanted)
        groups = ((key, [file_name(key, there.files[key])]) for key in wanted)
        for key, (value,) in self._fetched(groups):
            try:
                self.writer.commit_file(*local.open_file(bytes.fromhex(key), value))
                self.report.files.moved += 1
            except (DamagedError, ValueError) as error:
                self.report.note_damage(f"file {key}", str(error))

    def _own_files(self) -> dict[str, File]:
        found = {}
        for entry in self.store.files():
            try:
                mark = digest_of(local.file_value(self.store, entry))
            except DamagedError:  # replaced by the tier's
                continue
            found[keys.name_key(entry.path).hex()] = File(mark, entry.mtime_ns)
        return found

    def _forget(self, there: Catalogue) -> None:
        for entry in list(self.store.files()):
            if keys.name_key(entry.path).hex() not in there.files:
                self.report.removed += self.writer.remove_file(entry.path)
        self.writer.collect(keep=[bytes.fromhex(key) for key in there.chunks])


def _is_wanted(there: File, mine: File | None, newer: bool) -> bool:
    if mine is None or mine.mark == there.mark:
        return mine is None
    return not newer or (there.mtime_ns, there.mark) > (mine.mtime_ns, mine.mark)


def _with_bases(chunk: Chunk, levels: Iterable[str]) -> list[str]:
    """Those of these levels that a chunk has, each behind the coarser one that it refines."""
    found: list[str] = []
    for level in levels:
        chain: list[str] = []
        at: str | None = level
        while at is not None and at in chunk.levels and at not in found and at not in chain:
            chain.append(at)
            at = chunk.levels[at].base
        found += reversed(chain)
    return found
