"""Data of a shared store, a pack or another store: head, catalogue, shards, values, members of an archive."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import zstandard

from kvtool.core.cache import tables
from kvtool.core.cache.record import Kind, seal
from kvtool.core.cache.store import Store
from kvtool.core.remote import values
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.catalogue import Head, digest_of, seal_head, unseal_head
from kvtool.core.remote.catalogue_io import open_root, open_shard
from kvtool.core.remote.packs import export, opened_archive, take
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.fuzzing.registry import refused, scratch
from tests.stores import IDENTITY, LAYERS, id_of, info_of, make_store, put

_ZSTD = zstandard.ZstdCompressor()


@functools.cache
def _store() -> Path:
    path = make_store(scratch("shared") / "store")
    with Store.open(path) as store, store.writer() as writer:
        writer.set_manifest({"identity": IDENTITY})
        writer.set_codec_state({"profile": "", "losses": {"00" * 16: {"2": {"kl_answer": 0.5, "questions": 8}}}})
        put(writer, "f0.0", "lossless")
    return path


@functools.cache
def _tier() -> Path:
    folder = scratch("shared") / "tier"
    with Store.open(_store()) as store, closing(open_blobs(f"file://{folder}")) as blobs:
        push(store, blobs)
    return folder


@functools.cache
def _pack() -> Path:
    path = scratch("shared") / "sound.kvpack"
    export(_store(), path)
    return path


def head(data: bytes) -> None:
    """The one value that names the others, with the digest that it should have."""
    for value in (data, seal(b"remote head", Kind.MANIFEST, data)):
        with refused():
            unseal_head(value)


def catalogue(data: bytes) -> None:
    """The JSON of a catalogue or its root, or of a shard."""
    packed = _ZSTD.compress(data)
    for value in (data, packed):
        with refused():
            found = open_root(value)
            found.blobs()
            found.packs()
        with refused():
            open_shard(value, 0, 1, [])


def described(data: bytes) -> None:
    """Values that a catalogue describes, with digests that are right."""
    chunk, name = id_of("f0.0"), tables.name_key("f0")
    for meta in values.META:
        with refused():
            values.open_meta(meta, seal(meta.encode(), Kind.MANIFEST, data))
    with refused():
        values.open_file(name, seal(name, Kind.FILE, data))
    with refused():
        values.open_chunk(chunk, seal(chunk, Kind.CHUNK, data), IDENTITY, LAYERS)
    with refused():
        values.open_profile("ab" * 16, data)
    for kind in ("kv/" + chunk.hex() + "/raw-x/0", "profile/" + "ab" * 16, "head", "chunk/x-y"):
        values.is_sound(kind, data)


def tier(data: bytes) -> None:
    """A whole tier whose catalogue is somebody's, pulled into a new store and into one that has documents."""
    folder = scratch("shared") / "hostile-tier"
    if not folder.is_dir():
        shutil.copytree(_tier(), folder)
    packed = _ZSTD.compress(data)
    with closing(open_blobs(f"file://{folder}")) as blobs:
        blobs.put({f"catalogue/{digest_of(packed)}": packed, "head": seal_head(Head(digest_of(packed)))})
        for name in ("new", "own"):
            own = scratch("shared") / f"pulled-{name}"
            if name == "own" and not own.is_dir():
                make_store(own, files=1)
            with refused():
                pull(own, blobs)
            if name == "new":
                shutil.rmtree(own, ignore_errors=True)
    (folder / f"catalogue/{digest_of(packed)}").unlink(missing_ok=True)


def pack_file(data: bytes) -> None:
    path = scratch("shared") / "hostile.kvpack"
    path.write_bytes(data)
    with refused(), opened_archive(path) as blobs:
        names = [*blobs.names()][:50]
        assert sum(len(value or b"") for value in blobs.get(names)) <= len(names) * len(data)
    with refused():
        take(scratch("shared") / "taken", path)
    shutil.rmtree(scratch("shared") / "taken", ignore_errors=True)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _unpacked(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompress(path.read_bytes())


def _catalogues() -> list[bytes]:
    return [_unpacked(path) for kind in ("shard", "catalogue") for path in sorted((_tier() / kind).iterdir())]


def _descriptions() -> list[bytes]:
    with Store.open(_store()) as store:
        file = store.file("f0")
        assert file is not None
        sealed = values.file_value(store, file)
    return [
        sealed[64:-16],
        info_of("f0.0").to_bytes(),
        _json({"identity": IDENTITY}),
        _json({"losses": {"00" * 16: {"2": {}}}}),
    ]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "head": (
        head,
        lambda: [_json({"format": 1, "catalogue": "ab" * 16, "before": ["cd" * 16]}), seal_head(Head("ab" * 16))],
    ),
    "catalogue": (catalogue, _catalogues),
    "described": (described, _descriptions),
    "tier": (tier, lambda: _catalogues()[-1:]),
    "pack_file": (pack_file, lambda: [_pack().read_bytes()]),
}
