"""What of a catalogue is to be fetched, and which levels of a chunk only together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtool.core.cache import keys
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import level_of
from kvtool.core.errors import DamagedError
from kvtool.core.remote import survey, values
from kvtool.core.remote.catalogue import Catalogue, Chunk, File, digest_of


@dataclass(frozen=True, slots=True)
class Bundle:
    """Levels to fetch, the coarser first. `replaces`: in the place of what is stored, so all of them or none."""

    levels: tuple[str, ...]
    replaces: bool = False


def bundles(
    chunk: Chunk, asked: Iterable[str], stored: Collection[str], is_theirs: Callable[[str], bool]
) -> list[Bundle]:
    """What of a chunk is to be fetched.

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


# ---- of a store that is there ----


def wanted_records(
    store: Store, there: Catalogue, levels: Sequence[str] | None
) -> tuple[list[tuple[str, Bundle]], int]:
    """What of a tier's KV a store lacks, by chunk, and how many chunks at a level it has already."""
    wanted: list[tuple[str, Bundle]] = []
    known = 0
    for key, chunk in there.chunks.items():
        chunk_id = bytes.fromhex(key)
        asked = with_bases(chunk, chunk.levels if levels is None else levels)
        is_theirs = functools.partial(survey.holds_level, store, chunk_id, chunk)
        found = bundles(chunk, asked, store.levels(chunk_id), is_theirs)
        known += len(asked) - sum(len(one.levels) for one in found)
        wanted += [(key, one) for one in found]
    return wanted, known


def wanted_files(store: Store, there: Catalogue, newer: bool) -> list[str]:
    """Keys of the files that a store lacks, or has in another version."""
    mine = {}
    for entry in store.files():
        with suppress(DamagedError):  # replaced by the tier's
            mark = digest_of(values.file_value(store, entry))
            mine[keys.name_key(entry.path).hex()] = File(mark, entry.mtime_ns)
    return [key for key, one in there.files.items() if _is_wanted(one, mine.get(key), newer)]


def only_here(store: Store, there: Catalogue) -> list[str]:
    """Paths of the files that the tier does not have."""
    return [entry.path for entry in store.files() if keys.name_key(entry.path).hex() not in there.files]


def _is_wanted(there: File, mine: File | None, newer: bool) -> bool:
    if mine is None or mine.mark == there.mark:
        return mine is None
    return not newer or (there.mtime_ns, there.mark) > (mine.mtime_ns, mine.mark)
