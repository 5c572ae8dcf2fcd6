"""A hostile shared store: whatever it holds, a reader loses what is wrong, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvtool.core.cache import tables
from kvtool.core.cache.entries import ChunkInfo, ChunkRef, DocumentEntry, FileEntry, dump_json
from kvtool.core.cache.record import Kind, encode_record, seal, unseal
from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError, StoreFormatError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import Blobs, open_blobs
from kvtool.core.remote.catalogue import (
    FORMAT,
    HEAD,
    Catalogue,
    Head,
    digest_of,
    seal_head,
    unseal_head,
)
from kvtool.core.remote.catalogue_io import open_root, open_shard, read_catalogue, rows_of
from kvtool.core.remote.mirror import open_shared
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.spying import calls_of
from tests.stores import IDENTITY, LAYERS, LEAD_IN, header_of, id_of, ids_of, make_store, payload_of, put

CODEC = {"profile": "", "losses": {"00" * 16: {"2": {"kl_answer": 0.5, "questions": 8}}}}
NESTED: Any = json.loads("[" * 40 + "]" * 40)
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 10**4000, 1e300, 0.5),
    *("", "..", "../../x", "/etc/passwd", "a\0b", "\ud800", "1" * 40, "x" * 100_000),
    *([], [[]], [1], ["..", ".."], {}, {"..": 1}, {"1": "1"}, NESTED),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    with Store.open(make_store(folder / "store")) as store:
        with store.writer() as writer:
            writer.set_manifest({"identity": IDENTITY})
            writer.set_codec_state(CODEC)
            put(writer, "f0.0", "lossless")
        with closing(open_blobs(f"file://{folder / 'shared'}")) as blobs:
            push(store, blobs)
    return folder


@pytest.fixture
def store(built: Path) -> Iterator[Store]:
    with Store.open(built / "store") as opened:
        yield opened


@pytest.fixture
def blobs(built: Path, url: str) -> Iterator[Blobs]:
    with closing(open_blobs(f"file://{built / 'shared'}")) as shared, closing(open_blobs(url)) as opened:
        names = [name for name in shared.names() if name != "head.lock"]
        opened.put({name: value for name, value in zip(names, shared.get(names), strict=True) if value is not None})
        yield opened


# What a value that has come says is read by the same code, whatever it came by: of that a folder is enough.
in_a_folder = pytest.mark.parametrize("url", ["file"], indirect=True)


def text_of(catalogue: Catalogue) -> dict[str, Any]:
    """Return the JSON of a catalogue's root and of its one shard together."""
    rows = rows_of(catalogue.files, catalogue.chunks)
    value: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **catalogue.facts(), **rows}))
    return value


def read_text(value: Any) -> Catalogue:
    """Inverse of :func:`text_of`, by the readers of a root and of a shard."""
    left_out: list[tuple[str, str]] = []
    root = open_root(packed({**value, "shards": [None]}))
    files, chunks = open_shard(packed(value), 0, 1, left_out)
    return replace(root, files=files, chunks=chunks, left_out=tuple(left_out))


def packed(value: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(json.dumps(value).encode())


def publish(blobs: Blobs, data: bytes) -> None:
    blobs.put({f"catalogue/{digest_of(data)}": data, HEAD: seal_head(Head(digest_of(data)))})


def publish_parts(blobs: Blobs, value: dict[str, Any]) -> None:
    """Make the catalogue of this JSON, which is in one value, the one in force, with one shard."""
    parts = {name: value[name] for name in ("packs", "files", "chunks")}
    shard = packed(parts)
    blobs.put({f"shard/{digest_of(shard)}": shard})
    row = [digest_of(shard), len(shard), len(value["files"]), len(value["chunks"])]
    publish(blobs, packed({name: part for name, part in value.items() if name not in parts} | {"shards": [row]}))


def mutants(value: Any) -> Iterator[Any]:
    """Yield the value with each of its parts, and each of its keys, replaced by each hostile one, or gone."""
    for path in paths(value):
        for bad in HOSTILE:
            yield changed(value, path, lambda inner, key, bad=bad: inner.__setitem__(key, bad))
        yield changed(value, path, lambda inner, key: inner.__delitem__(key))
        if isinstance(path[-1], str):
            for name in ("..", "../../x", "9", "x" * 1000, ""):
                yield changed(value, path, lambda inner, key, name=name: inner.__setitem__(name, inner.pop(key)))


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*at, key)
        yield from paths(one, (*at, key))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> Any:
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return made


def one_of_each(catalogue: Catalogue) -> dict[str, Any]:
    value = text_of(catalogue)
    for name in ("files", "chunks"):
        value[name] = dict([max(value[name].items(), key=lambda item: len(str(item[1])))])
    return value


@in_a_folder
def test_mutated_catalogues(blobs: Blobs, tmp_path: Path) -> None:
    value = one_of_each(read_catalogue(blobs))
    assert read_text(value).chunks
    left = []
    for mutant in mutants(value):
        with contextlib.suppress(DamagedError, StoreFormatError):
            left.append(read_text(mutant))
    assert len(left) < 300  # a text may be another one, a part may lack
    for number, catalogue in enumerate(random.Random(0).sample(left, 8)):
        publish_parts(blobs, text_of(catalogue))
        with contextlib.suppress(DamagedError, StoreFormatError):
            pull(tmp_path / f"p{number}", blobs)


@in_a_folder
def test_mutated_catalogue_roots(blobs: Blobs) -> None:
    """Check it as a catalogue; and that a shard describes what belongs into it, and nothing else."""
    (head,) = blobs.get([HEAD])
    (root,) = blobs.get([f"catalogue/{unseal_head(head or b'').catalogue}"])
    value = json.loads(zstandard.ZstdDecompressor().decompress(root or b""))
    left = []
    for mutant in mutants(value):
        with contextlib.suppress(DamagedError, StoreFormatError):
            left.append(open_root(packed(mutant)))
    assert 0 < len(left) < 300  # as above
    ((digest, size, files, chunks),) = value["shards"]
    none = packed({"files": {}, "chunks": {}})
    blobs.put({f"shard/{digest_of(none)}": none})
    rows = ([digest, size, files + 1, chunks], [digest, size, files, 0], [digest_of(none), len(none), 0, 0])
    for shards in (value["shards"] * 2, value["shards"] * 3, [], *([row] for row in rows), [rows[-1]] * 2**16):
        publish(blobs, packed(value | {"shards": shards}))
        with pytest.raises(DamagedError):
            read_catalogue(blobs)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 40,
        packed([]),
        packed({}),
        zstandard.ZstdCompressor().compress(b"[" * 200_000),
        zstandard.ZstdCompressor().compress(b'{"format": NaN}'),
        zstandard.ZstdCompressor().compress(b" " * 50_000_000),  # small as it is sent
        zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"),
        b"\x28\xb5\x2f\xfd\xc0" + struct.pack("<Q", 2**40) + b"\0" * 50,  # a frame that states a terabyte
    ],
    ids=["none", "noise", "list", "empty", "nested", "no number", "bomb", "unsized", "terabyte"],
)
def test_pull_of_an_invalid_catalogue(data: bytes, blobs: Blobs, tmp_path: Path) -> None:
    publish(blobs, data)
    with pytest.raises(DamagedError):
        pull(tmp_path / "other", blobs)
    assert not (tmp_path / "other").exists()


def test_names_stay_in_the_folder(blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    asked = calls_of(monkeypatch, blobs, "get", lambda names: [*names])
    blobs.put({HEAD: seal_head(Head("../../secret"))})
    with pytest.raises(DamagedError):
        read_catalogue(blobs)
    assert {name for names in asked for name in names} == {HEAD}


# ---- values ----


def replace_value(blobs: Blobs, kind: str, key: bytes, value: bytes) -> None:
    found = text_of(read_catalogue(blobs))
    rows = found[f"{kind}s"]
    rows[key.hex()] = [digest_of(value), *rows[key.hex()][1 : 3 if kind == "file" else 4]]  # in no pack
    blobs.put({f"{kind}/{key.hex()}-{digest_of(value)}": value})
    publish_parts(blobs, found)


def damaged_by(blobs: Blobs, place: Path) -> list[str]:
    return [row["subject"] for row in pull(place, blobs).damaged]


OTHER_CHUNKS = (
    ChunkInfo(ids_of("another"), LEAD_IN, LAYERS),
    ChunkInfo(ids_of("f0.1"), b"another lead-in-----", LAYERS),
    ChunkInfo(ids_of("f0.1"), LEAD_IN, LAYERS + 1),
    ChunkInfo((), LEAD_IN, LAYERS),
)


@pytest.mark.parametrize("info", OTHER_CHUNKS)
def test_pull_of_a_chunk_that_does_not_match_its_id(info: ChunkInfo, blobs: Blobs, tmp_path: Path) -> None:
    key = id_of("f0.1")
    replace_value(blobs, "chunk", key, seal(key, Kind.CHUNK, info.to_bytes()))
    found = damaged_by(blobs, tmp_path / "other")
    assert found == [f"chunk {key.hex()}", f"chunk {key.hex()} at level raw", f"file {tables.name_key('f0').hex()}"]
    with Store.open(tmp_path / "other") as other:
        assert other.sources() == ["f1"]
        assert other.chunk_info(key) is None


def test_profile_that_does_not_match_its_digest() -> None:
    """Check names in spite of seals: a user who writes to the shared store can seal any value under any name."""
    digest = hashlib.blake2b(b"profile", digest_size=16).digest()
    assert values.open_profile(digest.hex(), seal(digest, Kind.PROFILE, b"profile")) == b"profile"
    with pytest.raises(DamagedError):
        values.open_profile(digest.hex(), seal(digest, Kind.PROFILE, b"another"))


def file_of(entry: FileEntry, *documents: DocumentEntry, key: str = "f0") -> bytes:
    parts = [entry.to_bytes(), *(document.to_bytes() for document in documents)]
    payload = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return seal(tables.name_key(key), Kind.FILE, payload)


ENTRY = FileEntry("f0", 1, 2, "digest", "settings", ("f0",))


@in_a_folder
@pytest.mark.parametrize(
    "value",
    [
        file_of(FileEntry("f1", 1, 2, "digest", "settings", ("f0",)), DocumentEntry("f0", "text", "x", ())),
        file_of(ENTRY, DocumentEntry("another", "text", "x", ())),
        file_of(ENTRY, *[DocumentEntry("f0", "text", "x", ())] * 2),
        file_of(FileEntry("f0", 10**30, 2, "digest", "settings", ("f0",)), DocumentEntry("f0", "text", "x", ())),
        file_of(FileEntry("f0", 1, -(10**30), "digest", "settings", ("f0",)), DocumentEntry("f0", "text", "x", ())),
        *(
            file_of(ENTRY, DocumentEntry("f0", "text", "x", (ref,)))
            for ref in (
                ChunkRef(id_of("f0.0"), 0, 2, 8),
                ChunkRef(id_of("f0.0"), -1, 1, 8),
                ChunkRef(id_of("f0.0"), 1, 0, 8),
                ChunkRef(id_of("f0.0"), 0, 1, 10**30),
                ChunkRef(b"short", 0, 1, 8),
                ChunkRef(b"", 0, 1, 8),
                ChunkRef(b"x" * 1000, 0, 1, 8),
                ChunkRef(id_of("nowhere"), 0, 1, 8),
            )
        ),
        seal(tables.name_key("f0"), Kind.FILE, struct.pack("<Q", 2**63)),
        seal(tables.name_key("f0"), Kind.FILE, b""),
        seal(tables.name_key("f0"), Kind.FILE, struct.pack("<Q", 10) + b"j" + b"[" * 9),
        seal(tables.name_key("f0"), Kind.FILE, struct.pack("<Q", 5000) + b"j" + b"[" * 4999),
    ],
)
def test_pull_of_invalid_file_entries(value: bytes, store: Store, blobs: Blobs, tmp_path: Path) -> None:
    replace_value(blobs, "file", tables.name_key("f0"), value)
    assert damaged_by(blobs, tmp_path / "other") == [f"file {tables.name_key('f0').hex()}"]
    with Store.open(tmp_path / "other") as other:
        assert [(entry.path, other.document(entry.path)) for entry in other.files()] == [("f1", store.document("f1"))]


def test_mutated_file_entries() -> None:
    entry = {"path": "f0", "size": 1, "mtime_ns": 2, "digest": "d", "settings": "s", "documents": ["f0"], "notes": []}
    document = {"source": "f0", "kind": "text", "text": "abc", "chunks": [[id_of("f0.0").hex(), 0, 1, 8]]}
    key = tables.name_key("f0")
    for first, second in [(one, document) for one in mutants(entry)] + [(entry, one) for one in mutants(document)]:
        parts = [b"j" + json.dumps(one).encode() for one in (first, second)]
        payload = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        try:
            found, (own,) = values.open_file(key, seal(key, Kind.FILE, payload))
        except DamagedError:
            continue
        assert found.path == "f0"
        assert own.source == "f0"
        assert all(0 <= ref.start <= ref.end <= len(own.text) for ref in own.chunks)


@pytest.mark.parametrize(("name", "state"), [("manifest", {"identity": IDENTITY}), ("codec", CODEC)])
def test_mutated_manifest_and_codec_state(name: str, state: dict[str, Any]) -> None:
    """Check that code that reads it afterwards gets known types, and can write them again."""
    for mutant in mutants(state):
        try:
            found = values.open_meta(name, seal(name.encode(), Kind.MANIFEST, json.dumps(mutant).encode()))
        except DamagedError:
            continue
        assert unseal(name.encode(), Kind.MANIFEST, values.sealed_meta(name, found))


def test_pull_of_another_stores_manifest(blobs: Blobs, tmp_path: Path) -> None:
    value = seal(b"manifest", Kind.MANIFEST, dump_json({"identity": IDENTITY | {"fingerprint": "another"}}))
    found = text_of(read_catalogue(blobs))
    found["meta"]["manifest"] = digest_of(value)
    blobs.put({f"meta/manifest-{digest_of(value)}": value})
    publish_parts(blobs, found)
    with pytest.raises(DamagedError):
        pull(tmp_path / "other", blobs)


@pytest.mark.usefixtures("no_packs")
def test_pull_of_records_of_another_shape_or_size(store: Store, url: str, tmp_path: Path) -> None:
    with closing(open_blobs(url)) as blobs:
        push(store, blobs)
        key, other = id_of("f0.1"), header_of(1, tokens=4)
        short = encode_record(key, other, [bytes(other.raw_bytes)])
        swapped = encode_record(key, header_of(0), payload_of("f0.1", 0))
        catalogue = read_catalogue(blobs)
        level = catalogue.chunks[key.hex()].levels["raw"]
        name = f"kv/{key.hex()}/raw-{level.mark}/1"
        (whole,) = blobs.get([name])
        for number, record in enumerate((short, swapped, whole + b"x", b"")):
            blobs.put({name: record})
            assert damaged_by(blobs, tmp_path / f"p{number}") == [f"chunk {key.hex()} at level raw"]
        found = text_of(catalogue)
        for number, size in enumerate((1, level.size - 1, level.size + 1)):
            found["chunks"][key.hex()][2]["raw"][0] = max(size, 80 * LAYERS)
            blobs.put({name: whole})
            publish_parts(blobs, found)
            assert damaged_by(blobs, tmp_path / f"s{number}") == [f"chunk {key.hex()} at level raw"]


def test_levels_that_refine_each_other_in_a_circle(blobs: Blobs, tmp_path: Path) -> None:
    found = text_of(read_catalogue(blobs))
    key = id_of("f0.0").hex()
    size, mark, *_ = found["chunks"][key][2]["lossless"]
    for bases in ({"1": "1"}, {"1": "2", "2": "1"}, {"1": "3", "3": None}, {"lossless": "1", "1": None}, {"4": "raw"}):
        levels = {level: [size, mark, base, None, None] for level, base in bases.items()}
        publish_parts(blobs, found | {"chunks": {key: [*found["chunks"][key][:2], levels, False]}})
        with pytest.raises(DamagedError):
            read_catalogue(blobs)
    chain = {"1": "2", "2": "3", "4": None}
    rows = {level: [size, mark, base, None, None] for level, base in chain.items()}
    catalogue = read_text(found | {"chunks": {key: [*found["chunks"][key][:2], rows, False]}})
    assert list(catalogue.chunks[key].levels) == ["4"]
    assert [what for what, _ in catalogue.left_out] == [f"chunk {key} at level {level}" for level in "21"]
    publish_parts(blobs, text_of(catalogue))


def test_query_of_a_hostile_shared_store(blobs: Blobs, store: Store) -> None:
    key, told = id_of("f0.1"), list[str]()
    replace_value(blobs, "chunk", key, seal(key, Kind.CHUNK, ChunkInfo((), LEAD_IN, LAYERS).to_bytes()))
    with open_shared(blobs.url, warn=lambda text, hint: told.append(text)) as tier:
        assert tier.sources() == ["f1"]
        assert any(key.hex() in text for text in told)
        found = tier.read_layer([id_of("f1.0"), key], "raw", 0)
        assert isinstance(found[0], tuple)
    publish(blobs, packed([]))
    told.clear()
    with open_shared(blobs.url, warn=lambda text, hint: told.append(text)) as tier:
        assert tier.sources() == ["f1"]
        assert "only what is here already is used" in told[0]
