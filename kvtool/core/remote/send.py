"""What a push sends and deletes: values that the shared store lacks or holds in part, and those that nobody needs.

A stored value counts only if its size is right."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import known
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, KvtoolError, RemoteError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import LEASES, Blobs
from kvtool.core.remote.catalogue import (
    HEAD,
    Catalogue,
    Chunk,
    File,
    Pack,
    Place,
    catalogue_name,
    digest_of,
    is_own,
    kv_names,
    unseal_head,
)
from kvtool.core.remote.catalogue_io import CatalogueCache, read_head, root_of, with_shards
from kvtool.core.remote.options import TransferReport
from kvtool.core.remote.prefetch import batches

KEPT = 2  # catalogues before the one in force: readers that hold one go on with it
_MOST_BEFORE = 64  # that a head names, while other pushes leave no time to reclaim them
_DELETED_AT_ONCE = 1000


def own_names(names: set[str]) -> set[str]:
    nested = tuple(name.removesuffix(HEAD) for name in names if name.endswith(f"/{HEAD}"))
    return {name for name in names if is_own(name) and not name.startswith(nested)}


def check_ours(blobs: Blobs) -> None:
    """Refuse to push where other things are, and no `head` of ours says that they may be there. A push that was cut off
    before its first head leaves values of ours, and nothing else."""
    names = set(blobs.names())
    foreign = sorted(names - own_names(names))
    if HEAD in names and not foreign and not _is_head(blobs):
        values = ((name, blobs.get([name])[0]) for name in names if name.startswith("catalogue/"))
        ours = any(value is not None and catalogue_name(digest_of(value)) == name for name, value in values)
        foreign = [] if ours else [HEAD]
    if foreign:
        more = f" and {len(foreign) - 1:,} more" if len(foreign) > 1 else ""
        raise StoreFormatError(
            f"{blobs.url} is not empty and holds no store of kvtool's: {foreign[0]}{more}",
            "name an empty or a new folder; in Redis another database or ?prefix=",
        )


def _is_head(blobs: Blobs) -> bool:
    (head,) = blobs.get([HEAD])
    with suppress(DamagedError):
        return head is not None and bool(unseal_head(head))
    return False


def check_share(listed: set[str], mine: Catalogue, theirs: Catalogue | None, url: str) -> None:
    blobs = {name for name in listed if name != HEAD and not name.startswith(("catalogue/", "shard/"))}
    gone = blobs - mine.blobs()
    documents = theirs.files if theirs is not None else {}
    forgotten = documents.keys() - mine.files.keys()
    if 2 * len(gone) > len(blobs) or 2 * len(forgotten) > len(documents):
        raise UsageError(
            f"--delete would forget {len(forgotten):,} of {len(documents):,} documents of {url} and delete "
            f"{len(gone):,} of {len(blobs):,} values",
            "look at it with --dry-run; if that is what you want, add --yes",
        )


class GarbageCollector:
    def __init__(self, blobs: Blobs, lease: Lease, report: TransferReport, events: Events) -> None:
        self.blobs, self._lease, self._report, self._events = blobs, lease, report, events

    def run(self, listed: set[str]) -> None:
        """Delete those of the listed names to which the catalogue in force does not refer. They were listed when the
        push began: later ones stay."""
        gone: set[str] = set()
        head, wanted = self._in_force()
        with self._lease.sweeping() as alone:
            while doomed := sorted(listed - wanted - gone)[:_DELETED_AT_ONCE]:
                if not alone():
                    count = len(listed - wanted - gone)
                    self._report.removals_deferred += count
                    text = f"{count:,} values of {self.blobs.url} were left there: another push is running"
                    self._events.warn(text, "delete later")
                    break
                if self.blobs.get([HEAD])[0] != head:
                    head, wanted = self._in_force()
                    continue
                self._delete(doomed)
                gone.update(doomed)

    def reclaim(self, head: bytes, joined: Catalogue, theirs: Catalogue, digest: str) -> tuple[str, ...]:
        """Delete values to which only catalogues long out of force refer, unless `head` is no longer in force: another
        push may count on just those values by now. Return the earlier catalogues that stay valid with the next head,
        which is of `joined` and its `digest`."""
        was = unseal_head(head)
        before = tuple(dict.fromkeys((was.catalogue, *was.before)))
        kept, old = before[:KEPT], before[KEPT:]
        if not old:
            return before
        with self._lease.sweeping() as alone:
            wanted = joined.blobs() | theirs.blobs()
            wanted |= self._counted_on(kept[1:], wanted)
            doomed = self._counted_on(old, wanted) - wanted
            names = {catalogue_name(each) for each in old if each != digest}
            others = sorted(doomed)
            parts = [others[at : at + _DELETED_AT_ONCE] for at in range(0, len(others), _DELETED_AT_ONCE)]
            for some in (*parts, sorted(names)):  # the catalogues last: they know the others
                if not alone() or self.blobs.get([HEAD])[0] != head:
                    return before[:_MOST_BEFORE]
                self._delete(some)
        return kept

    def _counted_on(self, digests: Iterable[str], known: set[str]) -> set[str]:
        names: set[str] = set()
        for digest in digests:
            try:
                root = root_of(self.blobs, digest)
                seen = known | names
                fresh = [number for number, shard in enumerate(root.shards) if shard and shard.name not in seen]
                names |= set(filter(is_own, with_shards(self.blobs, root, fresh).blobs()))
            except DamagedError:  # another push has reclaimed it
                continue
        return names

    def _in_force(self) -> tuple[bytes, set[str]]:
        try:
            head, catalogue = read_head(self.blobs)
        except StoreNotFoundError:
            raise RemoteError(f"the head of {self.blobs.url} has vanished", "push again") from None
        return head, {HEAD, catalogue_name(unseal_head(head).catalogue), *catalogue.blobs()}

    def _delete(self, names: list[str]) -> None:
        self._report.bytes_freed += sum(self.blobs.sizes(names))
        self._report.removed += len(names)
        self.blobs.delete(names)


# ---- leases of pushes and deletions --------------------------------------------------------------------------------
#
# A deletion first announces itself, then looks for running pushes; a push does the reverse. So at least one of the two
# sees the other: the deletion stops, the push waits, and only then asks what the shared store has already.

_RENEWED_EVERY = min(LEASES.values()) / 4
_LOOK_EVERY = 0.1  # seconds, while another one deletes
_LONGER = 5.0  # seconds to wait for what should be over by then


class Lease:
    """The lease by which a running push is seen by others."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._id = secrets.token_hex(8)
        self._renewed = float("-inf")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold it; entered when no other process deletes."""
        self.renew()
        try:
            # A deletion stops at its next values. A lease that outlives a dead process was taken by a wrong clock.
            until = time.monotonic() + LEASES["sweep"] + _LONGER
            while self._others("sweep") and time.monotonic() < until:
                time.sleep(_LOOK_EVERY)
                self._hold("push")
            yield
        finally:
            self._release("push")

    def renew(self) -> None:
        if time.monotonic() - self._renewed > _RENEWED_EVERY:
            self._hold("push")

    @contextmanager
    def sweeping(self) -> Iterator[Callable[[], bool]]:
        """Announce a deletion. Yields a check for right before each deletion: True if no push is running."""

        def alone() -> bool:
            self._hold("sweep")
            self._hold("push")
            return not self._others("push")

        self._hold("sweep")
        try:
            yield alone
        finally:
            self._release("sweep")

    def _hold(self, what: str) -> None:
        self._blobs.hold(f"{what}-{self._id}")
        self._renewed = time.monotonic()

    def _release(self, what: str) -> None:
        with suppress(KvtoolError):  # the shared store is gone: the lease expires
            self._blobs.release(f"{what}-{self._id}")

    def _others(self, what: str) -> bool:
        return any(name.startswith(f"{what}-") for name in self._blobs.held() - {f"{what}-{self._id}"})


_PACKS_AT_ONCE = 4  # values of some megabytes each: a place far away takes as long for all of them as for one


@dataclass(frozen=True)
class Sender:
    """`verify`: read back what is there, and send again what is damaged; else its size has to do."""

    store: Store
    blobs: Blobs
    lease: Lease
    report: TransferReport
    events: Events
    verify: bool

    def send(self, mine: Catalogue, theirs: Catalogue | None) -> Catalogue:
        """Send what is missing. Return the catalogue as the shared store has it now, with the places of packed values.

        It also differs from `mine` where a mark was taken from `theirs` and its records, made on another machine, are
        gone: a level may not mix two roundings. Raises KvtoolError if the store was changed meanwhile."""
        self._send_facts(mine)
        packs = sorted(mine.packs())
        sizes = self._sound_sizes([pack.name for pack in packs])
        broken = {pack for pack in packs if sizes[pack.name] != pack.size}
        places = self._send_descriptions(mine, broken | scattered(mine))
        self.events.step("chunks", sum(len(chunk.levels) for chunk in mine.chunks.values()), "chunks")
        gaps = self._gaps(mine, broken)
        mine = replace(mine, chunks=self._of_one_machine(mine.chunks, gaps, theirs))
        self._count(sum(len(chunk.levels) for chunk in mine.chunks.values()) - len(gaps), moved=False)
        lost = self._send_records(mine, gaps, places)
        return with_places(mine, places, lost)

    def mend(self, digest: str, theirs: Catalogue) -> None:
        shelf = CatalogueCache(self.blobs.url)
        root = shelf.get(digest)
        stated = {shard.name: shard.size for shard in theirs.shards if shard is not None}
        if root is not None:
            stated[catalogue_name(digest)] = len(root)
        sizes = self._sound_sizes(list(stated))
        broken = [name for name, size in stated.items() if sizes[name] != size]
        self._put({name: value for name in broken if (value := shelf.get(name.rpartition("/")[2])) is not None})

    # ---- KV ----

    def _gaps(self, mine: Catalogue, broken: set[Pack]) -> set[Member]:
        gaps, alone = set[Member](), list[tuple[Member, list[str]]]()
        for key, chunk in mine.chunks.items():
            for level, stored in chunk.levels.items():
                if stored.place is None and stored.size > MOST_BYTES:
                    alone.append(((key, level), kv_names(key, chunk, level)))
                elif stored.place is None or stored.place.pack in broken:
                    gaps.add((key, level))
        sizes = self._sound_sizes([name for _, names in alone for name in names])
        for (key, level), names in alone:
            found = [sizes[name] for name in names]
            if not all(found) or sum(found) != mine.chunks[key].levels[level].size:
                gaps.add((key, level))
        return gaps

    def _of_one_machine(
        self, chunks: Mapping[str, Chunk], gaps: set[Member], theirs: Catalogue | None
    ) -> dict[str, Chunk]:
        """Return the chunks, described anew if this store's records are not those that the shared store has lost."""
        found = dict(chunks)
        for key in sorted({key for key, _ in gaps}):
            chunk, chunk_id = chunks[key], bytes.fromhex(key)
            there = theirs.chunks[key].levels if theirs is not None and key in theirs.chunks else {}
            trusted = [
                level
                for level, stored in chunk.levels.items()
                if (key, level) in gaps and level in there and there[level].mark == stored.mark
            ]
            if not all(values.holds_level(self.store, chunk_id, chunk, level) for level in trusted):
                sealed = any(stored.seal for stored in chunk.levels.values())
                survey = values.Survey(self.store, self.report.note_damage, sealed)
                surveyed = survey.chunk(chunk_id, None, self.store.origin(chunk_id).is_foreign)
                if surveyed is None or surveyed.mark != chunk.mark:
                    raise changed()
                found[key] = replace(surveyed, place=chunk.place)
                gaps -= {(key, level) for level in chunk.levels}
                gaps |= {(key, level) for level in surveyed.levels}
        return found

    def _send_records(self, mine: Catalogue, gaps: set[Member], places: dict[Member, Place | None]) -> set[Member]:
        """Send the KV of `gaps`, and note the places; return the levels that the store has lost."""
        lost, chunks = set[Member](), mine.chunks
        ordered = by_document(self.store, mine.files, {key for key, _ in gaps}) if gaps else []

        def records_of(member: Member) -> list[bytes] | None:
            key, level = member
            try:
                records = values.records_of(self.store, bytes.fromhex(key), level, chunks[key].layers)
            except DamagedError as error:
                self.report.note_damage(f"chunk {key} at level {level}", error.message)
                lost.add(member)
                return None
            if values.mark_of_records(records) != chunks[key].levels[level].mark:
                raise changed()
            return records

        levels = {level for _, level in gaps}
        for level in [*sorted(levels.difference(known(levels))), *reversed(known(levels))]:
            members = [(key, level) for key in ordered if (key, level) in gaps]
            large = {member for member in members if chunks[member[0]].levels[level].size > MOST_BYTES}
            for packed, moved in self._send_packs((one for one in members if one not in large), records_of):
                self._count(len(packed.places), moved)
                places |= packed.places
            for key, _ in sorted(large):
                if (records := records_of((key, level))) is not None:
                    self._put(dict(zip(kv_names(key, chunks[key], level), records, strict=True)))
                    self._count(1, moved=True)
                    places[key, level] = None
        return lost

    def _send_packs(
        self, members: Iterable[Member], records_of: Callable[[Member], list[bytes] | None]
    ) -> Iterator[tuple[Packed, bool]]:
        """Send several packs at a time. Yield each on arrival; False: an interrupted push had sent it before."""
        for some in batches(
            packs_of(members, records_of), lambda packed: packed.pack.size, _PACKS_AT_ONCE * PACK_BYTES
        ):
            sizes = self._sound_sizes([packed.pack.name for packed in some])
            lacking = {packed.pack.name: packed.value for packed in some if sizes[packed.pack.name] != packed.pack.size}
            self._put(lacking)
            yield from ((packed, packed.pack.name in lacking) for packed in some)

    def _count(self, count: int, moved: bool) -> None:
        if moved:
            self.report.chunks.transferred += count
        else:
            self.report.chunks.unchanged += count
        self.events.advance(count)

    def _sound_sizes(self, names: list[str]) -> dict[str, int]:
        """Return the size in bytes of each stored value; 0 for one that is missing or known to be damaged."""
        if not self.verify:
            return dict(zip(names, self.blobs.sizes(names), strict=True))
        sizes = {}
        for at in range(0, len(names), _PACKS_AT_ONCE):
            some = names[at : at + _PACKS_AT_ONCE]
            self.lease.renew()  # to read all of a shared store may take hours
            for name, value in zip(some, self.blobs.get(some), strict=True):
                sizes[name] = len(value) if value is not None and values.is_sound(name, value) else 0
        return sizes

    # ---- all the rest ----

    def _send_facts(self, mine: Catalogue) -> None:
        names = [f"meta/{name}-{mark}" for name, mark in mine.meta.items()]
        names += [f"profile/{digest}" for digest in mine.profiles]
        facts = {name: values.value_of(self.store, name) or b"" for name in names}
        sizes = self._sound_sizes(list(facts))
        missing = {name: value for name, value in facts.items() if sizes[name] != len(value)}
        if not all(values.is_sound(name, value) for name, value in missing.items()):
            raise changed()
        self._put(missing)

    def _send_descriptions(self, mine: Catalogue, unsound: set[Pack]) -> dict[Member, Place | None]:
        """Send the descriptions that have no place yet, or one in an unsound pack; return their places."""

        def lacking(entries: Mapping[str, File] | Mapping[str, Chunk]) -> list[str]:
            return [key for key, entry in entries.items() if entry.place is None or entry.place.pack in unsound]

        def value_of(member: Member) -> list[bytes]:
            key, kind = member
            entry = mine.files[key] if kind == FILE else mine.chunks[key]
            value = values.value_of(self.store, f"{kind[1:]}/{key}-{entry.mark}")
            if value is None or digest_of(value) != entry.mark:
                raise changed()
            return [value]

        files, places = lacking(mine.files), dict[Member, Place | None]()
        self.report.files.transferred += len(files)
        self.report.files.unchanged = len(mine.files) - len(files)
        chunks = by_document(self.store, {*files}, lacking(mine.chunks))
        members = [*((key, CHUNK) for key in chunks), *((key, FILE) for key in files)]
        for packed, _ in self._send_packs(members, value_of):
            places |= packed.places
        return places

    def _put(self, values: dict[str, bytes]) -> None:
        self.lease.renew()
        if values:
            self.blobs.put(values)
            self.report.bytes += sum(map(len, values.values()))


def with_places(mine: Catalogue, places: Mapping[Member, Place | None], lost: set[Member]) -> Catalogue:
    """Return the catalogue with the places of what was sent, without levels that were lost and those that refine them:
    no catalogue names what is missing."""
    files, chunks = dict(mine.files), dict(mine.chunks)
    for (key, kind), place in places.items():
        if kind == FILE:
            files[key] = replace(files[key], place=place)
        elif kind == CHUNK:
            chunks[key] = replace(chunks[key], place=place)
    for key in {key for key, kind in {*places, *lost} if kind not in (FILE, CHUNK)}:
        levels = {level: stored for level, stored in chunks[key].levels.items() if (key, level) not in lost}
        while any(stored.base not in {None, *levels} for stored in levels.values()):
            levels = {level: stored for level, stored in levels.items() if stored.base in {None, *levels}}
        placed = {level: replace(row, place=places.get((key, level), row.place)) for level, row in levels.items()}
        chunks[key] = replace(chunks[key], levels=placed)
    return replace(mine, files=files, chunks=chunks)


# ---- packs: some megabytes of records of one level in one value, a document's next to each other -------------------

PACK_BYTES = 8 * 2**20  # of a pack; one chunk that is larger has a pack of its own
MOST_BYTES = 2**28  # of a level in a pack: Redis keeps no value of more than 512 MB. What is larger is sent by layer

Member = tuple[str, str]  # key of a chunk or a file in hex, level or FILE or CHUNK
FILE, CHUNK = "/file", "/chunk"  # in a level's place: the description of one


class Packed(NamedTuple):
    value: bytes
    pack: Pack
    places: dict[Member, Place]


def packs_of(members: Iterable[Member], records_of: Callable[[Member], list[bytes] | None]) -> Iterator[Packed]:
    """Pack the records of some members of one level, in their order. The same members and records make the same packs.
    `records_of` returns a member's records, layer by layer; None: it is left out."""
    filled = ((member, records) for member in members if (records := records_of(member)))
    for some in batches(filled, lambda pair: sum(map(len, pair[1])), PACK_BYTES):
        yield _pack(dict(some))


def _pack(members: Mapping[Member, list[bytes]]) -> Packed:
    value = b"".join(record for records in members.values() for record in records)
    pack, places, start = Pack(digest_of(value), len(value)), dict[Member, Place](), 0
    for member, records in members.items():
        places[member] = Place(pack, start, tuple(map(len, records)))
        start += sum(places[member].lengths)
    return Packed(value, pack, places)


def by_document(store: Store, files: Set[str] | Mapping[str, File], chunks: Iterable[str]) -> list[str]:
    """Return the chunks in the order of the documents of these files; those in none of them last."""
    order: dict[str, None] = {}
    wanted = dict.fromkeys(sorted(chunks))
    entries = [entry for entry in store.files() if tables.name_key(entry.path).hex() in files] if wanted else []
    for chunk_id in values.chunks_of(store, entries):
        if chunk_id.hex() in wanted:
            order[chunk_id.hex()] = None
        if len(order) == len(wanted):  # of a change: the other documents are not read
            break
    return [*{**order, **wanted}]


_SMALL = 8  # is a pack of less than an eighth of what one may have
_MOST_SMALL = 16  # of a store


def scattered(mine: Catalogue) -> set[Pack]:
    """Return the small packs of descriptions if small pushes have left many. They are joined, so that a new reader
    requests few; each small push costs no more than its share of that."""
    entries: tuple[File | Chunk, ...] = (*mine.files.values(), *mine.chunks.values())
    packs = {entry.place.pack for entry in entries if entry.place is not None}
    small = {pack for pack in packs if pack.size < PACK_BYTES // _SMALL}
    return small if len(small) > _MOST_SMALL else set()


def changed() -> KvtoolError:
    return KvtoolError("the store was changed meanwhile", "push again")
