"""Which levels of a chunk are fetched, and which of them only together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvtool.core.codec.levels import level_of
from kvtool.core.remote.catalogue import Chunk


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
