"""A catalogue in shards: a small root names values that each describe the files and chunks whose keys begin alike.

Keys are digests, so shards of one number of leading bits have about the same size, whatever is stored; and a value is
named by its digest, so that a push sends, and a reader fetches, only the shards in which something has changed, and the
root. Their number is doubled when they have become large: then all are sent once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import log2
from typing import Any

import zstandard

from kvtool.core.common.collecting import paused_collection
from kvtool.core.remote import checks
from kvtool.core.remote.catalogue import Catalogue, canonical, facts_of, proof_in, unreadable
from kvtool.core.remote.entries import Chunk, File, Shard, digest_of
from kvtool.core.remote.limits import most_bytes
from kvtool.core.remote.rows import MARK_BYTES, Entries, entries_of, packed, rows_of, unpacked
from kvtool.core.remote.signing import SigningKey

FORMAT = 4
ENTRIES = 512  # in a shard, when their number is chosen: some ten KB; a changed document of ten chunks changes twenty
_FEWEST, _MOST = ENTRIES // 4, ENTRIES * 2  # before it is chosen anew
_MOST_BITS = 20


def number_of(key: str, count: int) -> int:
    """Return the number of the shard (of `count`, a power of two) that a key belongs to: its first bits."""
    return int(key[:5], 16) * count >> _MOST_BITS


@paused_collection()  # of a million entries a look for garbage costs a tenth of what making them does
def sharded(catalogue: Catalogue, before: Catalogue | None) -> tuple[Catalogue, dict[str, bytes]]:
    """The catalogue with its shards, and the values of those that the catalogue of before does not have."""
    now = before.shards if before is not None else ()
    count = count_for(len(catalogue.files) + len(catalogue.chunks), len(now))
    parts = _split(catalogue, count)
    then = _split(before, count) if before is not None and len(now) == count else None
    shards, values = list[Shard | None](), dict[str, bytes]()
    for number, part in enumerate(parts):
        if then is not None and part == then[number]:
            shards.append(now[number])
        elif not any(part):
            shards.append(None)
        else:
            data = packed(canonical(rows_of(*part)))
            shards.append(Shard(digest_of(data), len(data), len(part[0]), len(part[1])))
            values[shards[-1].name] = data  # type: ignore[union-attr]
    return replace(catalogue, shards=tuple(shards)), values


def count_for(entries: int, now: int = 0) -> int:
    """Return the number of shards for so many entries; keep `now` as long as they are neither large nor tiny."""
    if now and entries <= _MOST * now and (now == 1 or entries >= _FEWEST * now):
        return now
    return 1 << min(_MOST_BITS, max(0, round(log2(max(1, entries) / ENTRIES))))


def _split(catalogue: Catalogue, count: int) -> list[Entries]:
    parts: list[Entries] = [(dict[str, File](), dict[str, Chunk]()) for _ in range(count)]
    for key, file in catalogue.files.items():
        parts[number_of(key, count)][0][key] = file
    for key, chunk in catalogue.chunks.items():
        parts[number_of(key, count)][1][key] = chunk
    return parts


# ---- the root ----------------------------------------------------------------------------------------------------


def pack_root(catalogue: Catalogue, key: SigningKey | None = None) -> bytes:
    """Serialise the root of a sharded catalogue, in canonical form. Signed by a key, or as it was when it was read."""
    return packed(canonical({"format": FORMAT, **catalogue.facts(), "shards": catalogue.shards}, catalogue.proof, key))


def open_root(value: dict[str, Any]) -> Catalogue:
    """Inverse of :func:`pack_root`, of its JSON: a catalogue with shards, and nothing of what they describe.

    Raises
    ------
    DamagedError : it cannot be.
    """
    try:
        shards = tuple(map(_shard_row, checks.list_of(value["shards"])))
        if len(shards).bit_count() != 1 or len(shards) > 1 << _MOST_BITS:
            raise ValueError("shards of another number than a power of two")
        return Catalogue(*facts_of(value), shards=shards, proof=proof_in(value))
    except (ValueError, KeyError) as error:
        raise unreadable(error) from error


def _shard_row(value: Any) -> Shard | None:
    if value is None:
        return None
    digest, size, files, chunks = checks.list_of(value, 4)
    checks.count_of(size, 1, most_bytes("shard"))
    checks.count_of(files, 0, checks.INT64)
    checks.count_of(chunks, 0 if files else 1, checks.INT64)  # of nothing there is no shard: a root could name it often
    return Shard(checks.hex_of(digest, MARK_BYTES), size, files, chunks)


# ---- shards ------------------------------------------------------------------------------------------------------


def open_shard(data: bytes, number: int, count: int, left_out: list[tuple[str, str]]) -> Entries:
    """Read the entries of a shard, by its number out of `count`; `left_out` as of `entries_of`.

    Raises
    ------
    DamagedError : it cannot be read, or describes what belongs into another shard.
    """
    try:
        files, chunks = entries_of(unpacked(data), left_out)
        if any(number_of(key, count) != number for keys in (files, chunks) for key in keys):
            raise ValueError("a shard describes what belongs into another one")
    except (ValueError, KeyError, zstandard.ZstdError) as error:
        raise unreadable(error) from error
    return files, chunks


@paused_collection()  # of a million entries a look for garbage costs a tenth of what making them does
def filled(root: Catalogue, entries: Iterable[tuple[int, bytes]]) -> Catalogue:
    """A root with all that some of its shards, given by number, describe.

    Raises
    ------
    DamagedError : one cannot be read, or describes another number than the root says.
    """
    files, chunks, left_out = dict[str, File](), dict[str, Chunk](), list[tuple[str, str]]()
    for number, data in entries:
        shard = root.shards[number]
        some_files, some_chunks = open_shard(data, number, len(root.shards), left_out)
        if shard is None or (shard.files, shard.chunks) != (len(some_files), len(some_chunks)):
            raise unreadable(ValueError("a shard describes another number of files or chunks"))
        files |= some_files
        chunks |= some_chunks
    return replace(root, files=files, chunks=chunks, left_out=tuple(left_out))
