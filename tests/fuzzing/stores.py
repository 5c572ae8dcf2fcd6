"""A store's folder: LMDB's pages, records of every level, entries, profiles, and the files next to them.

A digest that an attacker can compute is made right here, so that the code after its check is reached.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from kvtool.core.cache import layout, record
from kvtool.core.cache import side_files as notes
from kvtool.core.cache import side_files as sides
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry
from kvtool.core.cache.pages import newest_meta, parse_page
from kvtool.core.cache.record import KVHeader, decode_record, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import StretchInfo
from kvtool.core.cache.tree import DataFile, Tree, check_data_file, damaged_pages
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, shape_of
from kvtool.core.codec.levels import base_level
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.rans import coder
from kvtool.core.codec.rans.tables import LANES, Stream, TableSet, in_order, quantised
from kvtool.core.codec.row_subset import rows_of
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.prefix_cache import decode_part, encode_part
from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.segment import open_tables, write_tables
from tests.codec import test_fuzz as records
from tests.codec.rans import reference
from tests.codec.rans.streams import TABLES, stream_of, symbols_for
from tests.codec.synthetic import encoded
from tests.fuzzing.registry import refused, scratch
from tests.stores import id_of, make_store

_KEY = bytes(range(20))
_LEVELS = ("raw", "lossless", "1", "2", "3", "4", "keep50-raw", "keep50-lossless", "keep50-2")
_SHAPE = shape_of(records.HEADS, records.TOKENS, records.DIM, records.DIM)


@functools.cache
def _store() -> Path:
    return make_store(scratch("stores") / "store", files=4, chunks=3)


# ---- the pages that find a value ---------------------------------------------------------------------------------


def lmdb_file(data: bytes) -> None:
    """A data file: its meta pages, every look-up, every walk."""
    folder = scratch("stores") / "generation"
    folder.mkdir(exist_ok=True)
    path = folder / "data.mdb"
    path.write_bytes(data)
    with refused():
        check_data_file(folder)
    with refused(), path.open("rb") as file, closing(DataFile(path)) as opened:
        tree = Tree(opened, newest_meta(path, file))
        if tree.meta.last_page > 2**20:  # what is counted takes a byte for each page, of a file that says so
            return
        for look in (_walk, _look_up, lambda tree: list(damaged_pages(tree))):
            with refused():
                look(tree)


def _walk(tree: Tree) -> None:
    for key, value in tree.values(b""):
        assert len(value) <= tree.meta.file_bytes, key


def _look_up(tree: Tree) -> None:
    for key in (b"", b"\0", b"k", id_of("f0.0"), b"\xff" * 24):
        for ask in (tree.get, tree.touch, lambda key: tree.last(key, 16)):
            with refused():
                ask(key)
    list(tree.free_pages(full=False))


def lmdb_page(data: bytes) -> None:
    page = data[:4096].ljust(4096, b"\0")
    for ordered in (True, False):
        with refused():
            parse_page(int.from_bytes(page[:8], "little"), page, ordered)


def _pages() -> list[bytes]:
    data = next(iter(_store().rglob("data.mdb"))).read_bytes()
    return [data[at : at + 4096] for at in range(8192, len(data), 4096) if data[at : at + 4096].strip(b"\0")][:12]


def store_open(data: bytes) -> None:
    path = scratch("stores") / "opened"
    path.mkdir(exist_ok=True)
    (path / layout.STORE_FILE).write_bytes(data)
    with refused():
        layout.read_uuid(path)


# ---- records -----------------------------------------------------------------------------------------------------


def _enveloped(data: bytes) -> bytes:
    """A record whose stated length and digest are right, whatever else it says."""
    head = bytearray(data[: record.HEADER_BYTES].ljust(record.HEADER_BYTES, b"\0"))
    body = data[record.HEADER_BYTES :]
    at = record._HEADER.size - 16
    head[at : at + 8] = len(body).to_bytes(8, "little")
    whole = bytes(head) + body
    return whole + record._digest(_KEY, [whole])


@functools.cache
def _items() -> dict[str, Encoded]:
    """A sound record of each level, a chain of them where one refines the other."""
    found = dict(reversed(list(records.sources().values())))
    keys, values = records.MODEL.kv(1, records.TOKENS, dtype=torch.bfloat16)
    found |= encoded(keys, values, ["4"], records.PROFILE, 1)
    for level in (one for one in _LEVELS if one not in found):
        (parts,) = CODECS[level].encode_layers([(keys, values)], records.PROFILE)
        payload = b"".join(bytes(part) for part in parts)
        found[level] = Encoded(payload, _SHAPE, "bfloat16")
    return found


def record_of(level: str) -> Callable[[bytes], None]:
    """A record of a level: its header says what it likes, its digest is right, and kernels read what it holds."""

    def target(data: bytes) -> None:
        with refused():
            header, payload = decode_record(_KEY, _enveloped(data))
            if header.level != level or header.raw_bytes > 2**24:  # the description of a chunk bounds it
                return
            shape = shape_of(header.kv_heads, header.tokens, header.head_dim_k, header.head_dim_v)
            item = Encoded(bytearray(payload), shape, header.dtype, _items()[level].base)
            base_level(level, payload)
            CODECS[level].stated_error(payload)
            if level.startswith("keep"):
                rows_of(item)
            ((keys, values),) = CODECS[level].decode([item], 1, records.SHELF)
            assert keys.dtype == values.dtype

    return target


def _record_seeds(level: str) -> Callable[[], list[bytes]]:
    def made() -> list[bytes]:
        several = [item for its, item in records.sources().values() if its == level and item.shape == _SHAPE] or [
            _items()[level]
        ]
        header = KVHeader("bfloat16", records.HEADS, records.TOKENS, records.DIM, records.DIM, level, 1)
        return [encode_record(_KEY, header, [item.payload])[: -record.DIGEST_BYTES] for item in several]

    return made


def rans(data: bytes) -> None:
    """A stream with tables of its own: both decoders are of one mind."""
    if len(data) < 512 + 4 * LANES + 2:
        return
    raw = np.frombuffer(data[:512], np.uint16)
    states = np.frombuffer(data[512 : 512 + 4 * LANES], np.uint32)
    rest = data[512 + 4 * LANES :]
    rows, words = 1 + rest[0] % 8, np.frombuffer(rest[2 : 2 + len(rest[2:]) // 2 * 2], np.uint16)
    try:
        first = raw if rest[1] & 2 else quantised(raw[:256].astype(np.float64) + 1e-3)
        tables = TableSet(np.concatenate([first[None], TABLES.frequencies])) if rest[1] & 1 else TABLES
    except DamagedError:
        return
    ids = np.arange(64, dtype=np.uint16) % len(tables)
    stream, out = Stream.of(words, states), np.zeros((rows, 64), np.int16)
    try:
        expected = reference.decode(stream, rows, ids, tables)
    except DamagedError:
        expected = None
    try:
        coder.decode(coder.Decoding(stream, in_order(ids, tables), out))
    except DamagedError:
        assert expected is None
        return
    assert expected is not None
    assert np.array_equal(out, expected.astype(np.int16) - 128)


def _rans_seeds() -> list[bytes]:
    ids = np.arange(64, dtype=np.uint16) % len(TABLES)
    found = []
    for number in range(3):
        chance = np.random.default_rng(number)
        symbols = symbols_for(TABLES, np.broadcast_to(ids.astype(np.int64), (4, 64)), chance)
        stream = stream_of(symbols, ids)
        table = TABLES.frequencies[number].astype(np.uint16).tobytes()
        found.append(table + stream.states.tobytes() + bytes([3, 0]) + stream.words.tobytes())
    return found


def profile(data: bytes) -> None:
    """A codec profile, and what is made of it for a record."""
    with refused():
        found = Profile.from_bytes(data)
        for level in ("1", "2", "3"):
            with refused():
                found.coded(level, 0)
        found.forward(0)
        found.backward(0, "1", torch.bfloat16)


def stretch_part(data: bytes) -> None:
    with refused():
        decode_part(memoryview(bytearray(data)))


# ---- entries and the other files ---------------------------------------------------------------------------------


def entries(data: bytes) -> None:
    """Any of the entries: of a document, a file, a chunk, a stretch."""
    for read in (DocumentEntry.from_bytes, FileEntry.from_bytes, ChunkInfo.from_bytes, StretchInfo.from_bytes):
        with refused():
            made = read(data)
            if isinstance(made, DocumentEntry):
                for ref in made.chunks:
                    made.place(ref.start, ref.end)
            if isinstance(made, StretchInfo):
                assert len(made.places) <= len(data)


def _entry_seeds() -> list[bytes]:
    with Store.open(_store()) as store:
        document, file = store.document("f0"), store.file("f0")
        info = store.chunk_info(id_of("f0.0"))
        assert document is not None and file is not None and info is not None  # noqa: PT018
        stretch = StretchInfo(0, 8, (0, 1), (1,), (id_of("f0.0"),), True, 64, Arithmetic("float32", "cpu"))
        long = DocumentEntry("f", "text", "word " * 400, document.chunks)
        return [one.to_bytes() for one in (document, file, info, stretch, long)]


def side_files(data: bytes) -> None:
    with Store.open(_store()) as store:
        store.side_file("gate/x.json").write_bytes(data)
        store.read_side("gate/x.json")
        list(sides.damaged_files(store.path))
        for log in (layout.ACCESS_FILE, layout.SERVED_FILE):
            (store.path / log).write_bytes(data)
        notes.read_log(store.path)
        notes.read_served(store.path)


def _side_seeds() -> list[bytes]:
    value = {"format": 1, "rows": [1, 2.5, None, "x"]}
    line = json.dumps({"digest": sides.json_digest(value), **value}).encode()
    note = notes._line(f"{id_of('f0.0').hex()} 1700000000".encode())
    return [line, line + b"\n" + line, note * 3, notes._line(b"1 2 3")]


def index_tables(data: bytes) -> None:
    path = scratch("stores") / "index.tables"
    path.write_bytes(side_sealed(data))
    with refused():
        open_tables(path)
    folder = scratch("stores") / "index"
    folder.mkdir(exist_ok=True)
    for name in _index_files():
        (folder / name).write_bytes(side_sealed(data) if name.startswith("state") else _index_files()[name])
    with refused():
        Index.open(folder)


def side_sealed(data: bytes) -> bytes:
    return data + sides.tail_of(data)


@functools.cache
def _index_files() -> dict[str, bytes]:
    folder = scratch("stores") / "sound-index"
    with Store.open(_store()) as store:
        index = Index.empty()
        index.update(store)
        index.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _table_seeds() -> list[bytes]:
    path = scratch("stores") / "sound.tables"
    write_tables(path, {"rows": np.arange(12, dtype=np.uint32)}, {"segments": "[]"})
    return [data[: -sides.TAIL_BYTES] for data in (path.read_bytes(), *_index_files().values())]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "lmdb_file": (lmdb_file, lambda: [next(iter(_store().rglob("data.mdb"))).read_bytes()]),
    "lmdb_page": (lmdb_page, _pages),
    "store_json": (store_open, lambda: [(_store() / layout.STORE_FILE).read_bytes()]),
    **{f"record_{level.replace('-', '_')}": (record_of(level), _record_seeds(level)) for level in _LEVELS},
    "rans": (rans, _rans_seeds),
    "profile": (profile, lambda: [bytes(records.PROFILE.data)]),
    "stretch_part": (
        stretch_part,
        lambda: [encode_part({"keys": torch.ones(2, 3, dtype=torch.bfloat16), "state": torch.ones(5)})],
    ),
    "entries": (entries, _entry_seeds),
    "side_files": (side_files, _side_seeds),
    "index_tables": (index_tables, _table_seeds),
}
