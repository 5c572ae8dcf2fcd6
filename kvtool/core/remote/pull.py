"""Pull from a shared store into a local one: what is missing here, each value checked before it is stored."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvtool.core.cache import tables
from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry
from kvtool.core.cache.identity import HERE, ORIGIN, Origin
from kvtool.core.cache.options import StoreOptions
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, NoSpaceError, RemoteError, StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import MOST_BYTES, Blobs, Readable, open_blobs
from kvtool.core.remote.catalogue import Catalogue, Chunk, File, Place, chunk_name, digest_of, file_name, records_wanted
from kvtool.core.remote.catalogue_io import check_same_identity, read_catalogue
from kvtool.core.remote.options import PullOptions, TransferReport
from kvtool.core.remote.prefetch import Group, batches, fetch_groups
from kvtool.core.remote.values import join_codec
from kvtool.core.session.identity import StoreIdentity

Within = Callable[[str], bool]  # whether a key is among those that are looked at


@dataclass(frozen=True, slots=True)
class Bundle:
    """Levels to fetch, the coarser first. `replaces`: in the place of what is stored, so all of them or none."""

    levels: tuple[str, ...]
    replaces: bool = False


def bundles(
    chunk: Chunk, asked: Iterable[str], stored: Collection[str], is_theirs: Callable[[str], bool]
) -> list[Bundle]:
    """Return the levels of a chunk to fetch, grouped, of those `asked` in the order of :func:`with_bases`.

    A level refines the records of one coarser level. If the store holds other records of that coarser level (the same
    chunk, computed or compressed elsewhere, rounds differently; `is_theirs` is False), it is fetched, too."""
    asked = list(asked)
    missing = [level for level in asked if level not in stored]
    refined = {base for level in missing for base in with_bases(chunk, [level]) if base in stored}
    foreign = {level for level in refined if not is_theirs(level)}
    together = tuple(level for level in asked if level_of(level).nested and (level in foreign or level in missing))
    if not foreign:
        return [Bundle((level,)) for level in missing]
    return [*(Bundle((level,)) for level in missing if not level_of(level).nested), Bundle(together, replaces=True)]


def with_bases(chunk: Chunk, levels: Iterable[str]) -> list[str]:
    ordered: list[str] = []
    for level in levels:
        chain: list[str] = []
        at: str | None = level
        while at is not None and at in chunk.levels and at not in ordered and at not in chain:
            chain.append(at)
            at = chunk.levels[at].base
        ordered += reversed(chain)
    return ordered


def wanted_records(
    store: Store, catalogue: Catalogue, levels: Sequence[str] | None
) -> tuple[list[tuple[str, Bundle]], int]:
    if levels is not None and not levels:  # descriptions only: what is stored of a million chunks is not looked up
        return [], 0
    wanted: list[tuple[str, Bundle]] = []
    known = 0
    for key, chunk in catalogue.chunks.items():
        chunk_id = bytes.fromhex(key)
        asked = with_bases(chunk, chunk.levels if levels is None else levels)
        is_theirs = functools.partial(values.holds_level, store, chunk_id, chunk)
        missing = bundles(chunk, asked, store.levels(chunk_id), is_theirs)
        known += len(asked) - sum(len(bundle.levels) for bundle in missing)
        wanted += [(key, bundle) for bundle in missing]
    return wanted, known


class Origins:
    """The origin that each entry of a catalogue counts as: `own` if the catalogue's owner made it. What the owner has
    from others counts as untrusted."""

    def __init__(self, own: Origin, place: str, *, mirror: bool = False) -> None:
        self.own, self._other = own, own if mirror else Origin.untrusted(place)

    def of(self, entry: File | Chunk) -> Origin:
        return self._other if entry.foreign else self.own


def wanted_files(store: Store, catalogue: Catalogue, newer: bool, origins: Origins) -> tuple[list[str], list[str]]:
    """Return the keys of the files to fetch, and the paths of those that stay, since they are of another origin."""
    mine, kept = dict[str, File](), dict[str, str]()
    for entry in store.files():
        key = tables.name_key(entry.path).hex()
        if key not in catalogue.files:
            continue
        if entry.origin.is_foreign and not origins.of(catalogue.files[key]).is_foreign:
            continue  # the same file from a trusted source counts as made here
        with suppress(DamagedError):  # replaced by the shared store's
            mine[key] = File(digest_of(values.file_value(store, entry)), entry.mtime_ns)
        if not _may_replace(origins.of(catalogue.files[key]), entry.origin):
            kept[key] = entry.path
    wanted = [key for key, file in catalogue.files.items() if _is_wanted(file, mine.get(key), newer)]
    return [key for key in wanted if key not in kept], [kept[key] for key in wanted if key in kept]


def _may_replace(theirs: Origin, mine: Origin) -> bool:
    return not theirs.is_foreign or theirs == mine


def only_here(store: Store, catalogue: Catalogue, origin: Origin, within: Within = lambda key: True) -> list[str]:
    """Return the paths of files that the catalogue lacks, of those whose keys it covers; for an untrusted origin only
    files that came from it."""
    paths = [entry.path for entry in store.files() if _may_replace(origin, entry.origin)]
    keys = {path: tables.name_key(path).hex() for path in paths}
    return [path for path, key in keys.items() if key not in catalogue.files and within(key)]


def takeable(store: Store, catalogue: Catalogue, origins: Origins) -> Catalogue:
    """Return a catalogue with the chunks that a store may take: of foreign ones, those that are foreign here, too, or
    unknown and used by no document that is not foreign."""
    foreign = {key for key, chunk in catalogue.chunks.items() if origins.of(chunk).is_foreign}
    if not foreign:
        return catalogue
    own = ({*store.chunk_ids()} - store.foreign_chunks()) | own_references(store)
    taboo = foreign.intersection(chunk_id.hex() for chunk_id in own)
    chunks = {key: chunk for key, chunk in catalogue.chunks.items() if key not in taboo}
    return replace(catalogue, chunks=chunks)


def own_references(store: Store) -> set[bytes]:
    """Return the ids of the chunks that documents use which are not foreign, and of the beginning of their prompts.
    Raises DamagedError."""
    sources = [source for entry in store.files() if not entry.origin.is_foreign for source in entry.documents]
    documents = (store.document(source) for source in sources)
    used = {ref.chunk_id for document in documents if document is not None for ref in document.chunks}
    with suppress(StoreFormatError):  # then no prompt has a beginning
        identity = StoreIdentity.from_manifest(store.manifest())
        if identity is not None and not store.made_by().is_foreign:
            used.add(identity.prefix_id)
    return used


def check_share(store: Store, catalogue: Catalogue, url: str, origin: Origin) -> None:
    gone, count = len(only_here(store, catalogue, origin)), sum(1 for _ in store.files())
    if gone > max(1, count // 2):
        raise UsageError(
            f"--delete would forget {gone:,} of {count:,} files, which {url} does not have",
            "look at it with --dry-run; if that is what you want, add --yes; without --delete they stay",
        )


def _is_wanted(theirs: File, mine: File | None, newer: bool) -> bool:
    if mine is None or mine.mark == theirs.mark:
        return mine is None
    return not newer or (theirs.mtime_ns, theirs.mark) > (mine.mtime_ns, mine.mark)


_DEFAULTS = PullOptions()
_COMMITTED_AT_ONCE = 1024  # descriptions in one transaction
_HELD_BYTES = 2**26  # of descriptions that wait to be put into order; of many
# Bytes for each, a quarter of the catalogue's own memory: so each page is visited only a few times.
_HELD_OF_EACH = 2**9
_UNPACKED_AT_ONCE = 2**26  # bytes of documents that are held unpacked
_MOST_OF_FILE = 2**25  # bytes that the documents of a foreign file unpack to, a thousand times what a page of text has
_MOST_UNPACKED, _MOST_RATIO = 2**28, 64  # of all of them: so many bytes, and so many for each that came
_SMALL_AT_ONCE, _LARGE_AT_ONCE = 2048, 8  # descriptions, and bundles of records, that are asked for together
_TRIES = 9  # while pushes come in between and delete what is just fetched


def pull(
    path: Path,
    blobs: Blobs,
    options: PullOptions = _DEFAULTS,
    *,
    store: StoreOptions | None = None,
    events: Events | None = None,
) -> TransferReport:
    """Bring a store up to date with a shared store; a missing store is created. Run again to resume.

    A level comes with those that it refines. Where nobody is trusted, the store's own documents and their KV stay as
    they are. `store` may require a signature.

    Raises StoreNotFoundError (nothing was pushed), StoreFormatError (another model), UntrustedError, RemoteError,
    UsageError (more than half would be deleted). What came stays.
    """
    started, trust, levels = time.perf_counter(), options.trusted(store), options.levels or None
    catalogue, report = read_catalogue(blobs), TransferReport("pull", blobs.url, dry_run=options.dry_run)
    origin = report.judge(trust, catalogue.proof)
    if options.dry_run:
        _preview(path, catalogue, Origins(origin, blobs.url), options, report)
        report.seconds = time.perf_counter() - started
        return report
    with Store.create_or_open(path) as local, local.writer(options.lock_wait, options.max_size) as writer:
        if events is not None and catalogue.identity.get("keeps_states") and not local.stretches():
            events.warn(
                "a shared store holds no states, so none of this model come: questions compute and keep them here",
                "a pack of `kvtool store export` has them, for `kvtool store import`",
            )
        job = PullJob(local, writer, blobs, Origins(origin, blobs.url), report, options.remote_timeout, events)
        for _ in range(_TRIES):
            if options.delete and not options.yes:
                check_share(local, catalogue, blobs.url, origin)
            job.run(catalogue, levels, options.delete)
            if not report.damaged or (latest := read_catalogue(blobs)) == catalogue:
                break
            catalogue = latest  # what did not come may have been deleted with the one before
            origin = report.judge(trust, catalogue.proof)
            job.origins = Origins(origin, blobs.url)
    report.seconds = time.perf_counter() - started
    return report


def _preview(path: Path, catalogue: Catalogue, origins: Origins, options: PullOptions, report: TransferReport) -> None:
    with TemporaryDirectory() as empty:
        try:
            opened = Store.open(path)
        except StoreNotFoundError:
            opened = Store.create_or_open(Path(empty) / "store")
        with opened as store:
            if mine := store.manifest():
                check_same_identity(catalogue.identity, mine.get("identity", {}), str(path))
            files, report.conflicting_files = wanted_files(store, catalogue, False, origins)
            records, report.chunks.unchanged = wanted_records(
                store, takeable(store, catalogue, origins), options.levels or None
            )
            report.removed = len(only_here(store, catalogue, origins.own)) if options.delete else 0
    report.files.transferred, report.files.unchanged = len(files), len(catalogue.files) - len(files)
    report.chunks.transferred = sum(len(bundle.levels) for _, bundle in records)
    report.bytes = sum(catalogue.chunks[key].levels[level].size for key, bundle in records for level in bundle.levels)


def pull_from(
    url: str, folder: Path, options: PullOptions, events: Events, store: StoreOptions | None = None
) -> TransferReport:
    with closing(open_blobs(url, options.remote_timeout)) as blobs:
        return pull(folder, blobs, options, store=store, events=events)


@dataclass
class PullJob:
    """An update of a store to a catalogue, through a writer at hand; `report` counts it, also over several runs.

    A foreign origin replaces no documents but its own, gives no KV to chunks that other documents use, and no measured
    losses. `mirror`: True for a key that the catalogue covers; what is here of others stays.
    """

    store: Store
    writer: Writer
    blobs: Readable
    origins: Origins
    report: TransferReport
    timeout: float
    events: Events | None = None
    mirror: Within | None = None
    unpacked: int = 0  # bytes of documents that came

    def run(
        self, catalogue: Catalogue, levels: Sequence[str] | None, delete: bool = False, newer: bool = False
    ) -> None:
        """`levels`: of the KV that is fetched; None: all; none: descriptions only. `delete`: remove files that the
        catalogue lacks. `newer`: of a file in two versions take the one changed last; else the catalogue's."""
        self.report.damaged.clear()
        for what, why in catalogue.left_out:
            self.report.note_damage(what, why)
        mine = self.store.manifest()
        if mine:
            check_same_identity(catalogue.identity, mine.get("identity", {}), str(self.store.path))
        else:
            self._manifest(catalogue)
        self._profiles(catalogue)  # before the state that names them
        if not self.origins.own.is_foreign:  # losses that others state are not taken at their word
            self._state(catalogue)
        allowed = takeable(self.store, catalogue, self.origins)
        self._describe(allowed)
        self._records(allowed, levels)
        self._files(catalogue, newer)
        if delete:
            self._forget(catalogue, self.mirror or (lambda key: True))

    def _fetched(self, groups: Iterable[Group], at_once: int) -> Iterator[tuple[Group, list[bytes]]]:
        for group, whole in fetch_groups(self.blobs, groups, self.timeout, self.report.note_damage, at_once):
            self.report.bytes += sum(map(len, whole))
            yield group, whole

    def _single(self, groups: Iterable[Group]) -> Iterator[tuple[Group, bytes]]:
        ordered = sorted(groups, key=lambda group: (group.wanted[0].pack, group.wanted[0].start))
        for group, (value,) in self._fetched(ordered, _SMALL_AT_ONCE):
            yield group, value

    def _in_order(self, groups: Sequence[Group]) -> Iterator[list[tuple[Group, bytes]]]:
        """Yield small values, some for a transaction, sorted by key as far as memory allows.

        Unsorted, each page of the store would be read and written for one key. If the shared store stops answering,
        what has come is yielded first.
        """
        most = max(_HELD_BYTES, _HELD_OF_EACH * len(groups))
        held, size, failure = list[tuple[Group, bytes]](), 0, None
        try:
            for group, value in self._single(groups):
                held.append((group, value))
                size += len(value)
                if size > most:
                    yield from _parts(held)
                    held, size = [], 0
        except RemoteError as error:
            failure = error
        yield from _parts(held)
        if failure is not None:
            raise failure

    # ---- the parts ----

    def _manifest(self, catalogue: Catalogue) -> None:
        manifest = self._meta(catalogue, "manifest")
        if not manifest or manifest.get("identity") != catalogue.identity:
            raise DamagedError(f"the description of the model at {self.blobs.url} is damaged or lost", "push again")
        origin = Origin.untrusted(self.blobs.url) if self.mirror else self.origins.own
        self.writer.set_manifest(manifest | ({} if origin == HERE else {ORIGIN: origin.to_json()}))
        self.report.model = str(catalogue.identity.get("model", ""))

    def _state(self, catalogue: Catalogue) -> None:
        """A mirror takes the shared store's measurements; another store only those that it lacks."""
        try:
            stored = self.store.codec_state()
        except DamagedError:  # replaced by the shared store's
            stored = {}
        if catalogue.meta.get("codec") == digest_of(values.sealed_meta("codec", stored)):
            return
        theirs = self._meta(catalogue, "codec")
        joined = theirs if self.mirror or theirs is None else join_codec(stored, theirs)
        if joined is not None and joined != stored:
            self.writer.set_codec_state(joined)

    def _meta(self, catalogue: Catalogue, name: str) -> dict[str, Any] | None:
        if name in catalogue.meta:
            for group, value in self._single([_one_value(name, name, f"meta/{name}-{catalogue.meta[name]}")]):
                with self._noted(group):
                    return values.open_meta(name, value)
        return None

    def _profiles(self, catalogue: Catalogue) -> None:
        known = {digest.hex() for digest in self.store.profile_digests()}
        missing = (digest for digest in catalogue.profiles if digest not in known)
        groups = (_one_value(digest, f"profile {digest}", f"profile/{digest}") for digest in missing)
        for group, value in self._single(groups):
            with self._noted(group):
                self.writer.put_profile(bytes.fromhex(group.key), values.open_profile(group.key, value))

    def _describe(self, catalogue: Catalogue) -> None:
        known = {chunk.hex() for chunk in self.store.chunk_ids()}
        replaced = {chunk.hex() for chunk in self.store.foreign_chunks()}
        groups = [
            _one_value(key, f"chunk {key}", chunk_name(key, chunk), chunk.place)
            for key, chunk in catalogue.chunks.items()
            if key not in known or (key in replaced and not self.origins.of(chunk).is_foreign)
        ]
        for some in self._in_order(groups):
            infos: dict[Origin, dict[bytes, ChunkInfo]] = {}
            for group, value in some:
                chunk_id = bytes.fromhex(group.key)
                with self._noted(group):
                    layers = catalogue.chunks[group.key].layers
                    info = values.open_chunk(chunk_id, value, catalogue.identity, layers)
                    infos.setdefault(self.origins.of(catalogue.chunks[group.key]), {})[chunk_id] = info
            for origin, described in infos.items():
                self.writer.describe(described, origin)

    def _records(self, catalogue: Catalogue, levels: Sequence[str] | None) -> None:
        wanted, known = wanted_records(self.store, catalogue, levels)
        self.report.chunks.unchanged = max(0, known - self.report.chunks.transferred)  # some came in an earlier run
        events = self.events or Events()
        events.step("chunks", sum(len(bundle.levels) for _, bundle in wanted), "chunks")
        groups = (_records_of(key, catalogue.chunks[key], bundle) for key, bundle in wanted)
        for group, records in self._fetched(groups, _LARGE_AT_ONCE):
            with self._noted(group):
                self._put(group, catalogue.chunks[group.key], records)
            events.advance(len(group.levels))
        self.writer.flush()

    def _put(self, group: Group, chunk: Chunk, records: list[bytes]) -> None:
        chunk_id = bytes.fromhex(group.key)
        info = self.store.chunk_info(chunk_id)
        if info is None:
            raise DamagedError("its description did not come")
        origin = self.origins.of(chunk)
        if not origin.is_foreign and self.store.origin(chunk_id).is_foreign:
            raise DamagedError("its description did not come")  # what is stored here of it is another user's
        parts = [records[at : at + chunk.layers] for at in range(0, len(records), chunk.layers)]
        by_level = dict(zip(group.levels, parts, strict=True))
        for level, of_level in by_level.items():
            values.check_level(chunk_id, chunk, level, of_level, sealed=origin.trusted and origin != HERE)
            base = chunk.levels[level].base
            if base is not None and base not in by_level and not self.writer.has_level(chunk_id, base):
                raise DamagedError(f"level {base}, which it refines, did not come")
        if group.replaces:
            self.writer.flush()  # so that all of it is in one transaction
        for level, of_level in by_level.items():
            self.writer.put_chunk(chunk_id, info, level, of_level, replace=group.replaces, origin=origin)
        self.report.chunks.transferred += len(by_level)

    def _files(self, catalogue: Catalogue, newer: bool) -> None:
        wanted, self.report.conflicting_files = wanted_files(self.store, catalogue, newer, self.origins)
        self.report.files.unchanged = max(0, len(catalogue.files) - len(wanted) - self.report.files.transferred)
        files = [(key, catalogue.files[key]) for key in wanted]
        groups = [_one_value(key, f"file {key}", file_name(key, file), file.place) for key, file in files]
        for some in self._in_order(groups):
            opened, size = list[tuple[Group, FileEntry, list[DocumentEntry]]](), 0
            for group, value in some:
                origin = self.origins.of(catalogue.files[group.key])
                with self._noted(group):
                    size += self._unpacked_size(group, value, origin)
                    entry, documents = values.open_file(bytes.fromhex(group.key), value)
                    opened.append((group, replace(entry, origin=origin), documents))
                if size > _UNPACKED_AT_ONCE:
                    self._commit(opened)
                    opened, size = [], 0
            self._commit(opened)

    def _unpacked_size(self, group: Group, value: bytes, origin: Origin) -> int:
        """Return the unpacked bytes of a file's documents. Raises DamagedError if a few untrusted bytes would take up
        much of the memory or the time of this machine."""
        size = values.unpacked_size(bytes.fromhex(group.key), value)
        self.unpacked += size
        if origin.is_foreign and (
            size > _MOST_OF_FILE or self.unpacked > _MOST_UNPACKED + _MOST_RATIO * self.report.bytes
        ):
            self.unpacked -= size
            raise DamagedError(f"it unpacks to {size / 1e6:,.0f} MB, more than is accepted from an untrusted source")
        return size

    def _commit(self, files: Sequence[tuple[Group, FileEntry, list[DocumentEntry]]]) -> None:
        """Write files with their documents in one transaction, which costs as much as one of a single file. If that
        fails, write each in its own, so that a bad one does not keep the others out."""
        try:
            if files:
                self.writer.commit_files([(entry, documents) for _, entry, documents in files])
                self.report.files.transferred += len(files)
        except (ValueError, NoSpaceError):
            for group, entry, documents in files:
                with self._noted(group):
                    self.writer.commit_file(entry, documents)
                    self.report.files.transferred += 1

    @contextmanager
    def _noted(self, group: Group) -> Iterator[None]:
        try:
            yield
        except (DamagedError, ValueError) as error:
            self.report.note_damage(group.what, str(error))

    def _forget(self, catalogue: Catalogue, within: Within) -> None:
        for path in only_here(self.store, catalogue, self.origins.own, within):
            self.report.removed += self.writer.remove_file(path)
        outside = [chunk_id for chunk_id in self.store.chunk_ids() if not within(chunk_id.hex())]
        self.writer.collect(keep=[*map(bytes.fromhex, catalogue.chunks), *outside])


def _parts(held: list[tuple[Group, bytes]]) -> Iterator[list[tuple[Group, bytes]]]:
    ordered, most = sorted(held, key=lambda pair: pair[0].key), MOST_BYTES // 64
    return batches(ordered, lambda pair: max(len(pair[1]), most // _COMMITTED_AT_ONCE), most)


def _one_value(key: str, what: str, name: str, place: Place | None = None) -> Group:
    request = BlobRequest(name, MOST_BYTES)
    if place is not None:
        request = BlobRequest(name, place.lengths[0], place.pack.name, place.start)
    return Group(key, what, [request], request.most)


def _records_of(key: str, chunk: Chunk, bundle: Bundle) -> Group:
    wanted = [one for level in bundle.levels for one in records_wanted(key, chunk, level)]
    what = f"chunk {key} at level {', '.join(bundle.levels)}"
    most = sum(chunk.levels[level].size for level in bundle.levels)
    return Group(key, what, wanted, most, bundle.levels, bundle.replaces)
