"""What a store has and a tier has not, or not whole: values are counted on only as far as their sizes bear it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from kvtool.core.cache import keys
from kvtool.core.cache.store import Store
from kvtool.core.common.progress import Events
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.remote import survey, values
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import Catalogue, Chunk, chunk_name, file_name, kv_names
from kvtool.core.remote.lease import Lease
from kvtool.core.remote.transfer_report import TransferReport

_SMALL_AT_ONCE = 256
_CHUNKS_AT_ONCE = 64
_READ_AT_ONCE = 32  # values of some megabytes each

Gaps = dict[str, list[str]]  # level, names of its blobs that have to be sent


class Sender:
    """Sends what a catalogue of the store names.

    Parameters
    ----------
    verify : read back what is there, and send again what is damaged; else its size has to do.
    """

    def __init__(
        self, store: Store, blobs: Blobs, lease: Lease, report: TransferReport, events: Events, verify: bool
    ) -> None:
        self.store, self.blobs, self.lease = store, blobs, lease
        self.report, self.events, self.verify = report, events, verify

    def send(self, mine: Catalogue, theirs: Catalogue | None) -> Catalogue:
        """Send what is missing; the catalogue as the tier has it now.

        It differs from `mine` where a mark was taken from `theirs` and its records, made on another machine, are gone:
        half of a level may not be of one rounding and half of another.

        Raises
        ------
        RemoteError, NoSpaceError : the tier is gone or full.
        KvtoolError : the store was changed meanwhile.
        """
        self._send_small(mine, theirs)
        self.events.step("chunks", sum(len(chunk.levels) for chunk in mine.chunks.values()), "chunks")
        chunks, left = {}, iter(mine.chunks.items())
        while some := dict(islice(left, _CHUNKS_AT_ONCE)):
            for (key, chunk), gaps in zip(some.items(), self._gaps(some), strict=True):
                chunks[key] = self._send_chunk(key, chunk, gaps) if gaps else chunk
                moved = len(gaps)
                self.report.chunks.moved += moved
                self.report.chunks.unchanged += len(chunk.levels) - moved
                self.events.advance(len(chunk.levels))
        return mine.with_chunks(chunks)

    # ---- KV ----

    def _send_chunk(self, key: str, chunk: Chunk, gaps: Gaps, again: bool = True) -> Chunk:
        lost: set[str] = set()
        for level, names in gaps.items():
            try:
                records = survey.records_of(self.store, bytes.fromhex(key), level, chunk.layers)
            except DamagedError as error:
                self.report.note_damage(f"chunk {key} at level {level}", error.message)
                lost.add(level)
                continue
            if survey.mark_of_records(records) != chunk.levels[level].mark:
                if not again:
                    raise _changed()
                surveyed = survey.survey_chunk(self.store, bytes.fromhex(key), None, self.report.note_damage)
                if surveyed is None:
                    raise _changed()
                return self._send_chunk(key, surveyed, self._gaps({key: surveyed})[0], again=False)
            by_name = dict(zip(kv_names(key, chunk, level), records, strict=True))
            self._put({name: by_name[name] for name in names})
        return _without(chunk, lost)

    def _gaps(self, chunks: dict[str, Chunk]) -> list[Gaps]:
        """What has to be sent of each chunk."""
        places = [(key, level, kv_names(key, chunk, level)) for key, chunk in chunks.items() for level in chunk.levels]
        sizes = self._sound_sizes([name for _, _, names in places for name in names])
        gaps: dict[str, Gaps] = {key: {} for key in chunks}
        for key, level, names in places:
            missing = [name for name in names if not sizes[name]]
            if missing or sum(sizes[name] for name in names) != chunks[key].levels[level].size:
                gaps[key][level] = missing or names  # cut off: some of them, and nobody knows which
        return list(gaps.values())

    def _sound_sizes(self, names: list[str]) -> dict[str, int]:
        """How many bytes each value has that is there; 0 of one that is missing or known to be damaged."""
        if not self.verify:
            return dict(zip(names, self.blobs.sizes(names), strict=True))
        sizes = {}
        for at in range(0, len(names), _READ_AT_ONCE):
            some = names[at : at + _READ_AT_ONCE]
            for name, value in zip(some, self.blobs.get(some), strict=True):
                sizes[name] = len(value) if value is not None and values.is_sound(name, value) else 0
        return sizes

    # ---- all the rest ----

    def _send_small(self, mine: Catalogue, theirs: Catalogue | None) -> None:
        left, sent = self._small_values(mine), set[str]()
        while batch := dict(islice(left, _SMALL_AT_ONCE)):
            sizes = self._sound_sizes(list(batch))
            missing = {name: value for name, value in batch.items() if sizes[name] != len(value)}
            if not all(values.is_sound(name, value) for name, value in missing.items()):
                raise _changed()
            self._put(missing)
            sent |= missing.keys()
        known = {file_name(key, file) for key, file in theirs.files.items()} if theirs is not None else set()
        files = {file_name(key, file) for key, file in mine.files.items()}
        self.report.files.unchanged = len(files & known - sent)
        self.report.files.moved = len(files) - self.report.files.unchanged

    def _small_values(self, mine: Catalogue) -> Iterator[tuple[str, bytes]]:
        for name, mark in mine.meta.items():
            yield f"meta/{name}-{mark}", values.meta_value(self.store, name)
        for digest in mine.profiles:
            yield f"profile/{digest}", values.profile_value(self.store, digest)
        for entry in self.store.files():
            key = keys.name_key(entry.path).hex()
            if key in mine.files:
                yield file_name(key, mine.files[key]), values.file_value(self.store, entry)
        for key, chunk in mine.chunks.items():
            info = self.store.chunk_info(bytes.fromhex(key))
            if info is None:
                raise _changed()
            yield chunk_name(key, chunk), values.chunk_value(bytes.fromhex(key), info)

    def _put(self, values: dict[str, bytes]) -> None:
        self.lease.renew()
        if values:
            self.blobs.put(values)
            self.report.bytes += sum(map(len, values.values()))


def _without(chunk: Chunk, lost: set[str]) -> Chunk:
    """The chunk without levels that could not be sent and what refines them: no catalogue names what is not there."""
    while more := {level for level, stored in chunk.levels.items() if stored.base in lost and level not in lost}:
        lost = lost | more
    return replace(chunk, levels={level: stored for level, stored in chunk.levels.items() if level not in lost})


def _changed() -> KvtoolError:
    return KvtoolError("the store was changed meanwhile", "push again")
