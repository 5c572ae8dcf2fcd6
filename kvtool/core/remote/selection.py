"""Selection of what a pull takes from a catalogue: files, and levels of chunks, by origin and by what is stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvtool.core.cache import tables
from kvtool.core.cache.identity import Origin
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import level_of
from kvtool.core.errors import DamagedError, StoreFormatError, UsageError
from kvtool.core.remote import values
from kvtool.core.remote.catalogue import Catalogue, Chunk, File, digest_of
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
