"""What of a catalogue is to be fetched, and which levels of a chunk only together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtool.core.cache import keys
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import level_of
from kvtool.core.errors import DamagedError, UsageError
from kvtool.core.remote import survey, values
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, File, digest_of

Within = Callable[[str], bool]  # whether a key is among those that are looked at


@dataclass(frozen=True, slots=True)
class Bundle:
    """Levels to fetch, the coarser first. `replaces`: in the place of what is stored, so all of them or none."""

    levels: tuple[str, ...]
    replaces: bool = False


def bundles(
    chunk: Chunk, asked: Iterable[str], stored: Collection[str], is_theirs: Callable[[str], bool]
) -> list[Bundle]:
    """Which levels of a chunk are to be fetched.

    A level refines one very record of a coarser level. Where another one is stored here (the same chunk, computed or
    compressed elsewhere, rounds otherwise), the coarser one comes, too.

    Parameters
    ----------
    asked : levels, each behind those that it refines (:func:`with_bases`).
    is_theirs : whether the stored records of a level are those that the catalogue means.
    """
    asked = list(asked)
    missing = [level for level in asked if level not in stored]
    refined = {base for level in missing for base in with_bases(chunk, [level]) if base in stored}
    foreign = {level for level in refined if not is_theirs(level)}
    together = tuple(level for level in asked if level_of(level).nested and (level in foreign or level in missing))
    if not foreign:
        return [Bundle((level,)) for level in missing]
    return [*(Bundle((level,)) for level in missing if not level_of(level).nested), Bundle(together, replaces=True)]


def with_bases(chunk: Chunk, levels: Iterable[str]) -> list[str]:
    """The levels of these that a chunk has, each behind the coarser one that it refines."""
    ordered: list[str] = []
    for level in levels:
        chain: list[str] = []
        at: str | None = level
        while at is not None and at in chunk.levels and at not in ordered and at not in chain:
            chain.append(at)
            at = chunk.levels[at].base
        ordered += reversed(chain)
    return ordered


# ---- of a store that is there ----


def wanted_records(
    store: Store, catalogue: Catalogue, levels: Sequence[str] | None
) -> tuple[list[tuple[str, Bundle]], int]:
    """Which KV of a tier a store lacks, by chunk, and how many chunks at a level it has already."""
    if levels is not None and not levels:  # descriptions only: what is stored of a million chunks is not looked up
        return [], 0
    wanted: list[tuple[str, Bundle]] = []
    known = 0
    for key, chunk in catalogue.chunks.items():
        chunk_id = bytes.fromhex(key)
        asked = with_bases(chunk, chunk.levels if levels is None else levels)
        is_theirs = functools.partial(survey.holds_level, store, chunk_id, chunk)
        missing = bundles(chunk, asked, store.levels(chunk_id), is_theirs)
        known += len(asked) - sum(len(bundle.levels) for bundle in missing)
        wanted += [(key, bundle) for bundle in missing]
    return wanted, known


def wanted_files(store: Store, catalogue: Catalogue, newer: bool) -> list[str]:
    """Keys of the files that a store lacks, or has in another version."""
    mine = {}
    for entry in store.files():
        key = keys.name_key(entry.path).hex()
        with suppress(DamagedError):  # replaced by the tier's
            if key in catalogue.files:
                mine[key] = File(digest_of(values.file_value(store, entry)), entry.mtime_ns)
    return [key for key, file in catalogue.files.items() if _is_wanted(file, mine.get(key), newer)]


def only_here(store: Store, catalogue: Catalogue, within: Within = lambda key: True) -> list[str]:
    """Paths of the files that the tier does not have, of those whose keys the catalogue says everything of."""
    paths = ((entry.path, keys.name_key(entry.path).hex()) for entry in store.files())
    return [path for path, key in paths if key not in catalogue.files and within(key)]


def check_share(store: Store, catalogue: Catalogue, url: str) -> None:
    """Raises UsageError where more than half of a store's files would be forgotten."""
    gone, count = len(only_here(store, catalogue)), sum(1 for _ in store.files())
    if gone > max(1, count // 2):
        raise UsageError(
            f"--delete would forget {gone:,} of {count:,} files, which {url} does not have",
            "look at it with --dry-run; if that is what you want, add --yes; without --delete they stay",
        )


def _is_wanted(theirs: File, mine: File | None, newer: bool) -> bool:
    if mine is None or mine.mark == theirs.mark:
        return mine is None
    return not newer or (theirs.mtime_ns, theirs.mark) > (mine.mtime_ns, mine.mark)
