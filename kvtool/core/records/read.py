"""Reads records of a store with the coarser ones that they refine, and chunks as tensors; repairs chunks of which some
records cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.record import Allocator, aligned
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, Profiles, Shape, no_profiles, shape_of
from kvtool.core.codec.levels import RAW, base_level, exact, level_of
from kvtool.core.codec.row_subset import rows_of
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.model.prompt_cache import KVShape
from kvtool.core.records.encode import LeadIns, make

if TYPE_CHECKING:
    from kvtool.core.cache.backend import KVRead
    from kvtool.core.cache.chunks import ChunkReader
    from kvtool.core.cache.entries import ChunkSpec
    from kvtool.core.cache.store import Store
    from kvtool.core.cache.writer import Writer
    from kvtool.core.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Unusable:
    reason: str


def stored_shape(shape: KVShape, tokens: int) -> Shape:
    return shape_of(shape.heads, tokens, shape.key_dim, shape.value_dim)


def stored_rows(item: Encoded, level: str) -> Ids | None:
    """Read the tokens of a chunk whose rows a record has, ascending; None: all. Raises DamagedError."""
    return None if level_of(level).share == 100 else rows_of(item)


def read_stored_rows(store: ChunkReader, chunk_ids: Sequence[bytes], level: str) -> list[Ids | Unusable | None]:
    """Read the stored tokens of some chunks at a level off their first layer's records; None: all are stored."""
    if level_of(level).share == 100:
        return [None] * len(chunk_ids)
    rows: list[Ids | Unusable | None] = []
    for item in read_layer(store, chunk_ids, level, 0):
        try:
            rows.append(item if isinstance(item, Unusable) else rows_of(item))
        except DamagedError as error:
            rows.append(Unusable(f"damaged: {error.message}"))
    return rows


def exact_level(store: ChunkReader, chunk_id: bytes) -> str | None:
    return next(iter(exact(store.levels(chunk_id))), None)


def read_layer(
    store: ChunkReader,
    chunk_ids: Sequence[bytes],
    level: str,
    layer: int,
    *,
    shapes: Sequence[Shape] | None = None,
    before: Callable[[int], None] = lambda number: None,
    allocate: Allocator = aligned,
) -> list[Encoded | Unusable]:
    """Read one layer of several chunks, in order; every record is verified against its digest, its chunk and its level.
    `shapes`: required of the records; None: any. `before`, `allocate`: as of :meth:`ChunkReader.read_layer`."""
    read = store.read_layer(chunk_ids, level, layer, before, allocate)
    opened = [_opened(record, level, shapes[number] if shapes else None) for number, record in enumerate(read)]
    items, refined = [item for item, _ in opened], [base for _, base in opened]
    for base in {base for base in refined if base is not None}:
        numbers = [number for number, reference in enumerate(refined) if reference == base]
        coarser = read_layer(
            store,
            [chunk_ids[number] for number in numbers],
            base,
            layer,
            shapes=[shapes[number] for number in numbers] if shapes else None,
            before=lambda at, numbers=numbers: before(numbers[at]),  # type: ignore[misc]
            allocate=allocate,
        )
        for number, coarse in zip(numbers, coarser, strict=True):
            item = items[number]
            assert isinstance(item, Encoded)  # it names its base
            items[number] = coarse if isinstance(coarse, Unusable) else replace(item, base=coarse)
    return items


def _opened(
    record: KVRead | KvtoolError | None, level: str, shape: Shape | None
) -> tuple[Encoded | Unusable, str | None]:
    """Check a record; return it without its base, and the base's level if it needs one."""
    if record is None:
        return Unusable("not stored"), None
    if isinstance(record, KvtoolError):
        return Unusable(f"damaged: {record.message}" if isinstance(record, DamagedError) else record.message), None
    header, payload = record
    stored = shape_of(header.kv_heads, header.tokens, header.head_dim_k, header.head_dim_v)
    if shape is not None and stored != shape:
        return Unusable(f"stored shape {stored} does not fit"), None
    try:
        return Encoded(payload, stored, header.dtype), base_level(level, payload)
    except DamagedError as error:
        return Unusable(f"damaged: {error.message}"), None


def read_records(
    store: ChunkReader, chunk_ids: Sequence[bytes], level: str, layer: int, shapes: Sequence[Shape] | None = None
) -> list[Encoded]:
    """Read one layer of several chunks. Raises DamagedError: a record is missing, damaged or of another shape."""
    items: list[Encoded] = []
    for chunk_id, item in zip(chunk_ids, read_layer(store, chunk_ids, level, layer, shapes=shapes), strict=True):
        if isinstance(item, Unusable):
            where = f"layer {layer} of chunk {chunk_id.hex()[:12]} at level {level}"
            raise DamagedError(f"{where} cannot be read: {item.reason}", REPAIR)
        items.append(item)
    return items


def read_chunk(
    store: ChunkReader,
    chunk_id: bytes,
    level: str,
    layers: int,
    profiles: Profiles = no_profiles,
    shapes: Sequence[Shape] | None = None,
) -> ChunkKV:
    """Read all layers of a chunk as tensors; `shapes`: required of its layers. Raises DamagedError."""
    expected = [None] * layers if shapes is None else [[shape] for shape in shapes]
    items = [read_records(store, [chunk_id], level, layer, shape)[0] for layer, shape in enumerate(expected)]
    return ChunkKV(*zip(*CODECS[level].decode_layers(items, profiles), strict=True))


# ---- repair ------------------------------------------------------------------------------------------------------


def repair_chunks(
    store: Store,
    decoder: Decoder,
    profiles: Profiles,
    lead_ins: Callable[[ChunkSpec], LeadIns],
    chunks: Sequence[ChunkSpec],
    is_wanted: Callable[[ChunkSpec], bool] = lambda chunk: True,
) -> None:
    """Drop the records of some chunks that cannot be read; prefill and store those chunks of which no lossless level is
    left. `lead_ins`: what a chunk is prefilled after. `is_wanted`: asked while nobody else writes. Raises KvtoolError:
    the store is locked, full or read-only."""
    with store.writer() as writer:
        writer.require_room()
        wanted = [chunk for chunk in chunks if is_wanted(chunk)]
        lost = [chunk for chunk in wanted if not _drop_unreadable(store, writer, decoder, profiles, chunk)]
        after = [lead_ins(chunk) for chunk in lost]
        for before in dict.fromkeys(after):
            batch = [chunk for chunk, own in zip(lost, after, strict=True) if own is before]
            for records in make(decoder, before, batch):
                writer.put_chunk(records.chunk_id, records.info, records.level, records.layers)


def _drop_unreadable(store: Store, writer: Writer, decoder: Decoder, profiles: Profiles, chunk: ChunkSpec) -> bool:
    """Drop only what cannot be read of a chunk; return whether a lossless level is left."""
    try:
        info = store.chunk_info(chunk.chunk_id)
    except DamagedError:
        info = None
    if info is not None and (info.token_ids, info.lead_in, info.layers) != (
        chunk.ids,
        chunk.lead_in,
        decoder.stored_layers,
    ):
        writer.drop_chunks([chunk.chunk_id])  # another chunk's
        return False
    stored = store.sizes_here(chunk.chunk_id)
    sound = [level for level in stored if _is_readable(store, decoder, profiles, chunk, level)]
    for level in {*stored, RAW} - {*sound}:  # raw: records that no row counts any longer
        writer.drop_level([chunk.chunk_id], level)
    return info is not None and bool(exact(sound))


def _is_readable(store: Store, decoder: Decoder, profiles: Profiles, chunk: ChunkSpec, level: str) -> bool:
    shapes = [stored_shape(shape, len(chunk.ids)) for shape in decoder.shapes]
    try:
        read_chunk(store, chunk.chunk_id, level, decoder.stored_layers, profiles, shapes)
    except DamagedError:
        return False
    return True
