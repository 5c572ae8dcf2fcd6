"""Catalogue of a shared store: the files and chunks that it holds. Its `head` names the catalogue that is valid.

======================================  ================================================================
blob                                    holds
======================================  ================================================================
``head``                                the name of the catalogue and of those before, in the store's envelope
``catalogue/DIGEST``                    its root: the model, what is known of it, and the shards
``shard/DIGEST``                        the files and chunks whose keys begin alike, with the places of what is of them
``meta/NAME-MARK``                      the manifest and the state of the codec
``profile/DIGEST``                      a codec profile
``pack/DIGEST``                         KV records of chunks at one level, one after the other, as in the local store;
                                        or descriptions: files' entries with their documents, chunks' token ids
``file/KEY-MARK``, ``chunk/ID-MARK``    such a description alone, as older versions pushed it
``kv/ID/LEVEL-MARK/LAYER``              such a record alone: as older versions pushed it, or too large for a pack
======================================  ================================================================

A mark is a digest of the value, so no name ever means two values: readers of the catalogue before keep theirs.
A name of any other shape is not ours, nor is what stands below another `head`: nothing of it is ever deleted.

A catalogue in one value has formats 1 to 3 (:meth:`Catalogue.pack`): so it stands in the file of `kvtool store export`,
and so older versions pushed it. In shards it has format 4 (`shards.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import zstandard

from kvtool.core.codec.levels import whole
from kvtool.core.errors import DamagedError, StoreFormatError
from kvtool.core.remote import checks
from kvtool.core.remote.entries import Chunk, File, Pack, Shard, chunk_name, file_name, kv_names
from kvtool.core.remote.rows import MARK_BYTES, entries_of, packed, packs_of, rows_of, unpacked
from kvtool.core.remote.signing import Proof, SigningKey, catalogue_digest, proof_of, proof_row

FORMAT = 3  # of one in one value
_PLAIN_FORMAT = 1  # of one without packs and without levels that leave rows out, which every kvtool reads
_PARTIAL_FORMAT = 2  # without packs
_PUSH_AGAIN = "push again from a store that is whole"
_PROFILE_BYTES = (16, 20)  # of a codec profile, of a learned lead-in of earlier versions


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A catalogue of a shared store. Keys and ids are in hex; two stores may be joined if they have the same
    `identity`.

    Attributes
    ----------
    left_out : entries that could not be used when the catalogue was read, and why.
    shards : of a sharded catalogue, by the first bits of the keys, a power of two of them; None for an empty shard.
    proof : its signature, not yet verified; None if it is not signed.
    """

    identity: dict[str, Any]
    meta: dict[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()
    files: dict[str, File] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    shards: tuple[Shard | None, ...] = field(default=(), compare=False)
    proof: Proof | None = field(default=None, compare=False)

    def pack(self, key: SigningKey | None = None) -> bytes:
        """Canonical, packed, in one value; signed by a key, or as it was when it was read."""
        value = {"format": self._format(), **self.facts(), **rows_of(self.files, self.chunks)}
        return packed(canonical(value, self.proof, key))

    @classmethod
    def unpack(cls, data: bytes) -> Catalogue:
        """Inverse of :meth:`pack`; every part is checked for what it can be before anything is made of it.

        Raises
        ------
        DamagedError : it cannot be read.
        StoreFormatError : a newer kvtool wrote it.
        """
        return cls.of(value_of(data, FORMAT))

    @classmethod
    def of(cls, value: dict[str, Any]) -> Catalogue:
        """Read a catalogue from the JSON of a packed one. Raises DamagedError."""
        try:
            left_out = list[tuple[str, str]]()
            files, chunks = entries_of(value, left_out)
            return cls(*facts_of(value), files, chunks, tuple(left_out), proof=proof_in(value))
        except (ValueError, KeyError) as error:
            raise unreadable(error) from error

    def facts(self) -> dict[str, Any]:
        """Return all parts but files, chunks and shards, as JSON."""
        return {"identity": self.identity, "meta": self.meta, "profiles": sorted(self.profiles)}

    def _format(self) -> int:
        if self.packs():
            return FORMAT
        levels = {name for row in self.chunks.values() for name in row.levels}
        return _PLAIN_FORMAT if len(whole(levels)) == len(levels) else _PARTIAL_FORMAT

    def packs(self) -> set[Pack]:
        """The packs that what it describes stands in."""
        return packs_of(self.files.values(), self.chunks.values())

    def with_entries(self, files: dict[str, File], chunks: dict[str, Chunk]) -> Catalogue:
        """This catalogue with other files and chunks."""
        return replace(self, files=files, chunks=chunks)

    def blobs(self) -> set[str]:
        """The names of all blobs that it counts on, its root and `head` aside."""
        names = {f"meta/{name}-{mark}" for name, mark in self.meta.items()}
        names |= {f"profile/{digest}" for digest in self.profiles}
        names |= {shard.name for shard in self.shards if shard is not None}
        return names | blobs_of(self.files, self.chunks)


def canonical(value: dict[str, Any], proof: Proof | None = None, key: SigningKey | None = None) -> bytes:
    """Return a catalogue's JSON, the same for the same catalogue; with the signature of a key, else with `proof`."""
    plain = _json(value)
    proof = proof if key is None else key.sign(catalogue_digest(plain))
    return plain if proof is None else _json(value | {"signature": proof_row(proof)})


def proof_in(value: dict[str, Any]) -> Proof | None:
    """Read the signature in a catalogue's JSON. Raises ValueError, KeyError."""
    row = value.get("signature")
    if row is None:
        return None
    rest = {name: part for name, part in value.items() if name != "signature"}
    return proof_of(checks.object_of(row), catalogue_digest(_json(rest)))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def blobs_of(files: Mapping[str, File], chunks: Mapping[str, Chunk]) -> set[str]:
    """The names of all blobs that these count on."""
    names = {pack.name for pack in packs_of(files.values(), chunks.values())}
    names |= {file_name(key, file) for key, file in files.items() if file.place is None}
    for key, chunk in chunks.items():
        if chunk.place is None:
            names.add(chunk_name(key, chunk))
        for level, stored in chunk.levels.items():
            if stored.place is None:
                names.update(kv_names(key, chunk, level))
    return names


def value_of(data: bytes, newest: int) -> dict[str, Any]:
    """The JSON of a catalogue, of the formats up to `newest`. Raises DamagedError, StoreFormatError."""
    try:
        value = unpacked(data)
        number = checks.count_of(value["format"], 0, checks.INT64)
    except (ValueError, KeyError, zstandard.ZstdError) as error:
        raise unreadable(error) from error
    if number > newest:
        raise StoreFormatError(f"the shared store has format {number}", "update kvtool")
    return value


def facts_of(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Identity, meta and profiles: inverse of :meth:`Catalogue.facts`. Raises ValueError, KeyError."""
    meta = {
        checks.name_of(name): checks.hex_of(mark, MARK_BYTES) for name, mark in checks.object_of(value["meta"]).items()
    }
    profiles = tuple(checks.hex_of(row, *_PROFILE_BYTES) for row in checks.list_of(value["profiles"]))
    return checks.identity_of(value["identity"]), meta, profiles


def unreadable(error: Exception) -> DamagedError:
    """Return the error for a catalogue that cannot be read."""
    return DamagedError(f"the shared store's catalogue cannot be read: {error}", _PUSH_AGAIN)
