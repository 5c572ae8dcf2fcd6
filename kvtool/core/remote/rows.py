"""JSON rows of a catalogue: files and chunks with their levels, and the packs that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import zstandard

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.codec.levels import LEVELS, coarser, nested
from kvtool.core.remote import checks
from kvtool.core.remote.entries import Chunk, File, Level, Pack, Place
from kvtool.core.remote.limits import MOST_BYTES, MOST_LAYERS, MOST_LEVEL_BYTES

MARK_BYTES = 16
SEAL_BYTES = 32
_MOST_UNPACKED = 2**29
_MOST_RATIO = 32  # to one

Entries = tuple[dict[str, File], dict[str, Chunk]]


# ---- JSON in few bytes -------------------------------------------------------------------------------------------


def packed(text: bytes) -> bytes:
    """JSON as it is kept."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)


def unpacked(data: bytes) -> dict[str, Any]:
    """Inverse of :func:`packed`. Such JSON is mostly digests: what claims to have been packed much better is none.

    Raises
    ------
    ValueError, zstandard.ZstdError : it cannot be read.
    """
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= min(_MOST_UNPACKED, _MOST_RATIO * len(data) + 2**16):
        raise ValueError("its size is out of bounds")
    return checks.object_of(checks.strict_json(zstandard.ZstdDecompressor().decompress(data)))


# ---- entries -> JSON ---------------------------------------------------------------------------------------------


def packs_of(files: Iterable[File], chunks: Iterable[Chunk]) -> set[Pack]:
    """The packs that these stand in."""
    found = {file.place.pack for file in files if file.place is not None}
    for chunk in chunks:
        found.update(level.place.pack for level in chunk.levels.values() if level.place is not None)
        if chunk.place is not None:
            found.add(chunk.place.pack)
    return found


def rows_of(files: Mapping[str, File], chunks: Mapping[str, Chunk]) -> dict[str, Any]:
    """A JSON object of them; the same for the same entries."""
    numbers = {pack: number for number, pack in enumerate(sorted(packs_of(files.values(), chunks.values())))}
    value: dict[str, Any] = {
        "files": {key: [row.mark, row.mtime_ns, *_placed(row.place, numbers)] for key, row in files.items()},
        "chunks": {
            key: [
                row.mark,
                row.layers,
                {name: _level_row(level, numbers) for name, level in row.levels.items()},
                *_placed(row.place, numbers),
            ]
            for key, row in chunks.items()
        },
    }
    makers = {key: row.makers for key, row in chunks.items() if row.makers}
    if makers:
        value["makers"] = makers  # beside the chunks: a kvtool that does not know of it reads the rest
    seals = {key: row.seals for key, row in chunks.items() if row.seals}
    if seals:
        value["seals"] = seals
    foreign = sorted(key for rows in (files, chunks) for key, row in rows.items() if row.foreign)
    if foreign:
        value["foreign"] = foreign
    if numbers:
        value["packs"] = list(numbers)
    return value


def _placed(place: Place | None, numbers: Mapping[Pack, int]) -> list[int]:
    return [] if place is None else [numbers[place.pack], place.start, place.lengths[0]]


def _level_row(level: Level, numbers: Mapping[Pack, int]) -> list[Any]:
    """Records of one length need no more than their sum."""
    row: list[Any] = [level.size, level.mark, level.base]
    if level.place is not None:
        lengths = level.place.lengths
        row += [numbers[level.place.pack], level.place.start, [] if len({*lengths}) == 1 else [*lengths]]
    return row


# ---- JSON -> entries, each checked for what it can be ------------------------------------------------------------


def entries_of(value: dict[str, Any], left_out: list[tuple[str, str]]) -> Entries:
    """Inverse of :func:`rows_of`.

    Parameters
    ----------
    left_out : is told what cannot be used, and why.

    Raises
    ------
    ValueError, KeyError : something of it cannot be.
    """
    makers, seals = (checks.object_of(value.get(name, {})) for name in ("makers", "seals"))
    packs = [_pack(row) for row in checks.list_of(value.get("packs", []))]
    files = {checks.hex_of(key, ID_BYTES): _file(row, packs) for key, row in checks.object_of(value["files"]).items()}
    chunks = {
        checks.hex_of(key, ID_BYTES): _chunk(key, row, makers.get(key, {}), seals.get(key, {}), packs, left_out)
        for key, row in checks.object_of(value["chunks"]).items()
    }
    for key in map(checks.text_of, checks.list_of(value.get("foreign", []))):
        if key in files:
            files[key] = replace(files[key], foreign=True)
        if key in chunks:
            chunks[key] = replace(chunks[key], foreign=True)
    return files, chunks


def _file(value: Any, packs: list[Pack]) -> File:
    mark, mtime_ns = checks.list_of(checks.list_of(value)[:2], 2)
    mtime_ns = checks.count_of(mtime_ns, -checks.INT64, checks.INT64)
    return File(checks.hex_of(mark, MARK_BYTES), mtime_ns, _description(value[2:], packs))


def _chunk(key: str, value: Any, makers: Any, seals: Any, packs: list[Pack], left_out: list[tuple[str, str]]) -> Chunk:
    mark, layers, levels = checks.list_of(checks.list_of(value)[:3], 3)
    layers = checks.count_of(layers, 0, MOST_LAYERS)  # 0: of a model that keeps states, no KV of chunks is stored
    checks.object_of(makers)
    checks.object_of(seals)
    by_name = {
        name: _level(name, row, layers, makers.get(name), seals.get(name), packs)
        for name, row in checks.object_of(levels).items()
    }
    for name in reversed(nested(by_name)):  # coarsest first: what refines nothing is of no use to what refines it
        base = by_name[name].base
        if base is not None and base not in by_name:
            del by_name[name]
            left_out.append((f"chunk {key} at level {name}", f"level {base}, which it refines, is not there"))
    return Chunk(checks.hex_of(mark, MARK_BYTES), layers, by_name, _description(value[3:], packs))


def _level(name: str, value: Any, layers: int, maker: Any, seal: Any, packs: list[Pack]) -> Level:
    placed = checks.list_of(value)[3:]
    size, mark, base = checks.list_of(value[:3], 3)
    if name not in LEVELS:
        raise ValueError(f"there is no level {name[:20]!r} here: a plugin made it, or a newer kvtool")
    if base is not None and base != coarser(name):
        raise ValueError(f"nothing at level {name} refines level {str(base)[:20]!r}")
    return Level(
        checks.count_of(size, layers * OVERHEAD_BYTES, MOST_LEVEL_BYTES),
        checks.hex_of(mark, MARK_BYTES),
        base,
        None if maker is None else checks.hex_of(maker, MARK_BYTES),
        _place(placed, size, layers, packs) if placed else None,
        None if seal is None else checks.hex_of(seal, SEAL_BYTES),
    )


def _pack(value: Any) -> Pack:
    digest, size = checks.list_of(value, 2)
    return Pack(checks.hex_of(digest, MARK_BYTES), checks.count_of(size, 1, MOST_BYTES))


def _place(value: list[Any], size: int, layers: int, packs: list[Pack]) -> Place:
    """Read the place of a level's records, all of them within their pack."""
    number, start, lengths = checks.list_of(value, 3)
    pack = packs[checks.count_of(number, 0, len(packs) - 1)]
    checks.count_of(start, 0, pack.size - size)
    if layers and not checks.list_of(lengths):
        lengths = [size // layers] * layers
    for length in checks.list_of(lengths, layers):
        checks.count_of(length, OVERHEAD_BYTES, size)
    if sum(lengths) != size:
        raise ValueError("records of another size than their level")
    return Place(pack, start, tuple(lengths))


def _description(value: list[Any], packs: list[Pack]) -> Place | None:
    """Read the place of the description of a file or a chunk; None if it is a value of its own."""
    if not value:
        return None
    number, start, length = checks.list_of(value, 3)
    pack = packs[checks.count_of(number, 0, len(packs) - 1)]
    length = checks.count_of(length, 1, pack.size)
    return Place(pack, checks.count_of(start, 0, pack.size - length), (length,))
