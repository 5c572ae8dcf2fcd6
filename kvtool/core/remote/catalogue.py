"""What a shared tier holds, as one small value; its `head` names the catalogue that is valid.

======================================  ================================================================
blob                                    holds
======================================  ================================================================
``head``                                the name of the catalogue and of those before, in the store's envelope
``catalogue/DIGEST``                    this, packed
``meta/NAME-MARK``                      the manifest, the state of the codec and of the lead-in
``profile/DIGEST``                      a codec profile or a learned lead-in
``file/KEY-MARK``                       a file's entry with its documents
``chunk/ID-MARK``                       a chunk's token ids, lead-in and side data
``pack/DIGEST``                         KV records of chunks at one level, one after the other, as in the local store
``kv/ID/LEVEL-MARK/LAYER``              one such record alone: as older versions pushed it, or too large for a pack
======================================  ================================================================

A mark is a digest of the value, so no name ever means two values: readers of the catalogue before keep theirs.
A name of any other shape is not ours, nor is what stands below another `head`: nothing of it is ever deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import zstandard

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.codec.levels import LEVELS, nested, whole
from kvtool.core.codec.nested import coarser
from kvtool.core.errors import DamagedError, StoreFormatError
from kvtool.core.remote import checks
from kvtool.core.remote.entries import Chunk, File, Level, Pack, Place, chunk_name, file_name, kv_names
from kvtool.core.remote.limits import MOST_BYTES, MOST_LAYERS, MOST_LEVEL_BYTES

FORMAT = 3
_PLAIN_FORMAT = 1  # of one without packs and without levels that leave rows out, which every kvtool reads
_PARTIAL_FORMAT = 2  # without packs
_MOST_UNPACKED = 2**29
_MOST_RATIO = 32  # to one
_MARK_BYTES = 16
_PUSH_AGAIN = "push again from a store that is whole"
_PROFILE_BYTES = (16, 20)  # of a codec profile, of a learned lead-in


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a tier holds. Keys and ids are in hex; two stores may be joined if they have the same `identity`.

    Attributes
    ----------
    left_out : of one that was read: what cannot be used, and why.
    """

    identity: dict[str, Any]
    meta: dict[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()
    files: dict[str, File] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def pack(self) -> bytes:
        """Canonical, packed."""
        numbers = {pack: number for number, pack in enumerate(sorted(self.packs()))}
        value = {
            "format": self._format(),
            "identity": self.identity,
            "meta": self.meta,
            "profiles": sorted(self.profiles),
            "files": {key: [row.mark, row.mtime_ns] for key, row in self.files.items()},
            "chunks": {
                key: [row.mark, row.layers, {name: _row(level, numbers) for name, level in row.levels.items()}]
                for key, row in self.chunks.items()
            },
        }
        makers = {key: row.makers for key, row in self.chunks.items() if row.makers}
        if makers:
            value["makers"] = makers  # beside the chunks: a kvtool that does not know of it reads the rest
        if numbers:
            value["packs"] = list(numbers)
        text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)

    @classmethod
    def unpack(cls, data: bytes) -> Catalogue:
        """Inverse of :meth:`pack`; every part is checked for what it can be before anything is made of it.

        Raises
        ------
        DamagedError : it cannot be read.
        StoreFormatError : a newer kvtool wrote it.
        """
        try:
            return _parsed(checks.object_of(checks.strict_json(_unpacked(data))))
        except (ValueError, KeyError, zstandard.ZstdError) as error:
            raise DamagedError(f"the shared store's catalogue cannot be read: {error}", _PUSH_AGAIN) from error

    def _format(self) -> int:
        if self.packs():
            return FORMAT
        levels = {name for row in self.chunks.values() for name in row.levels}
        return _PLAIN_FORMAT if len(whole(levels)) == len(levels) else _PARTIAL_FORMAT

    def packs(self) -> set[Pack]:
        """The packs that its levels stand in."""
        levels = (level for chunk in self.chunks.values() for level in chunk.levels.values())
        return {level.place.pack for level in levels if level.place is not None}

    def with_chunks(self, chunks: dict[str, Chunk]) -> Catalogue:
        """This catalogue with other chunks."""
        return replace(self, chunks=chunks)

    def blobs(self) -> set[str]:
        """The names of all blobs that it counts on, itself and `head` aside."""
        names = {f"meta/{name}-{mark}" for name, mark in self.meta.items()}
        names |= {f"profile/{digest}" for digest in self.profiles}
        names |= {file_name(key, file) for key, file in self.files.items()}
        for key, chunk in self.chunks.items():
            names.add(chunk_name(key, chunk))
            for level, stored in chunk.levels.items():
                names.update(kv_names(key, chunk, level) if stored.place is None else [stored.place.pack.name])
        return names


def _row(level: Level, numbers: Mapping[Pack, int]) -> list[Any]:
    """A level as the catalogue has it; records of one length need no more than their sum."""
    row: list[Any] = [level.size, level.mark, level.base]
    if level.place is not None:
        lengths = level.place.lengths
        row += [numbers[level.place.pack], level.place.start, [] if len({*lengths}) == 1 else [*lengths]]
    return row


def _unpacked(data: bytes) -> bytes:
    """The JSON of a packed catalogue, which is mostly digests: what claims to have been packed much better is none."""
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= min(_MOST_UNPACKED, _MOST_RATIO * len(data) + 2**16):
        raise ValueError("its size is out of bounds")
    return zstandard.ZstdDecompressor().decompress(data)


def _parsed(value: dict[str, Any]) -> Catalogue:
    if checks.count_of(value["format"], 0, checks.INT64) > FORMAT:
        raise StoreFormatError(f"the shared store has format {value['format']}", "update kvtool")
    makers, left_out = checks.object_of(value.get("makers", {})), list[tuple[str, str]]()
    packs = [_pack(row) for row in checks.list_of(value.get("packs", []))]
    return Catalogue(
        identity=checks.identity_of(value["identity"]),
        meta={
            checks.name_of(name): checks.hex_of(mark, _MARK_BYTES)
            for name, mark in checks.object_of(value["meta"]).items()
        },
        profiles=tuple(checks.hex_of(row, *_PROFILE_BYTES) for row in checks.list_of(value["profiles"])),
        files={checks.hex_of(key, ID_BYTES): _file(row) for key, row in checks.object_of(value["files"]).items()},
        chunks={
            checks.hex_of(key, ID_BYTES): _chunk(key, row, makers.get(key, {}), packs, left_out)
            for key, row in checks.object_of(value["chunks"]).items()
        },
        left_out=tuple(left_out),
    )


def _file(value: Any) -> File:
    mark, mtime_ns = checks.list_of(value, 2)
    return File(checks.hex_of(mark, _MARK_BYTES), checks.count_of(mtime_ns, -checks.INT64, checks.INT64))


def _chunk(key: str, value: Any, makers: Any, packs: list[Pack], left_out: list[tuple[str, str]]) -> Chunk:
    mark, layers, levels = checks.list_of(value, 3)
    layers = checks.count_of(layers, 0, MOST_LAYERS)  # 0: of a model that keeps states, no KV of chunks is stored
    checks.object_of(makers)
    by_name = {
        name: _level(name, row, layers, makers.get(name), packs) for name, row in checks.object_of(levels).items()
    }
    for name in reversed(nested(by_name)):  # coarsest first: what refines nothing is of no use to what refines it
        base = by_name[name].base
        if base is not None and base not in by_name:
            del by_name[name]
            left_out.append((f"chunk {key} at level {name}", f"level {base}, which it refines, is not there"))
    return Chunk(checks.hex_of(mark, _MARK_BYTES), layers, by_name)


def _level(name: str, value: Any, layers: int, maker: Any, packs: list[Pack]) -> Level:
    placed = checks.list_of(value)[3:]
    size, mark, base = checks.list_of(value[:3], 3)
    if name not in LEVELS:
        raise ValueError(f"there is no level {name[:20]!r} here: a plugin made it, or a newer kvtool")
    if base is not None and base != coarser(name):
        raise ValueError(f"nothing at level {name} refines level {str(base)[:20]!r}")
    return Level(
        checks.count_of(size, layers * OVERHEAD_BYTES, MOST_LEVEL_BYTES),
        checks.hex_of(mark, _MARK_BYTES),
        base,
        None if maker is None else checks.hex_of(maker, _MARK_BYTES),
        _place(placed, size, layers, packs) if placed else None,
    )


def _pack(value: Any) -> Pack:
    digest, size = checks.list_of(value, 2)
    return Pack(checks.hex_of(digest, _MARK_BYTES), checks.count_of(size, 1, MOST_BYTES))


def _place(value: list[Any], size: int, layers: int, packs: list[Pack]) -> Place:
    """Where a level's records stand, all of them within their pack."""
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
