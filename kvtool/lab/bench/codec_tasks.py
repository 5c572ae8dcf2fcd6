"""What `kvtool bench codec` measures: each task is a list of jobs that do not depend on one another."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import DTYPES, NAMES, Encoded, LayerKV
from kvtool.core.codec.encode import finest_numbers, symbols_of, wider
from kvtool.core.codec.levels import LEVELS, NESTED, exact
from kvtool.core.codec.profile import SIDES, Profile
from kvtool.core.codec.rans.coder import Decoding, Encoding, decode, encode
from kvtool.core.codec.rans.reference import ZERO, Stream, in_order
from kvtool.core.codec.record import Record
from kvtool.core.common.arithmetic import product_dtype
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.native.job import scratch
from kvtool.lab.bench.sample import AT_ONCE, Sample

SIDE = "K or V of a layer of a chunk"
ONE = "a layer of a chunk"
CHUNK = "all layers of a chunk"
MANY = f"a layer of {AT_ONCE} chunks"
CONSTRICTION = "constriction ANS decode"

Job = Callable[[], Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure.

    Parameters
    ----------
    raw_bytes : of the numbers that the jobs go through, at 16 bit.
    bytes : of what these are encoded to.
    flops : of the transform.
    threaded : it is worth measuring with several threads.
    """

    what: str
    level: str | None
    jobs: Sequence[Job]
    raw_bytes: int
    bytes: int | None
    batch: str
    flops: int = 0
    threaded: bool = True
    note: str = ""


def all_tasks(sample: Sample, profile: Profile, pool: ThreadPoolExecutor) -> list[Task]:
    """Every task, their records made by `pool`."""
    tasks = [*_plain_tasks(sample, pool), *_lossless_tasks(sample, pool)]
    tasks.append(_forward_limit(sample, profile))
    for level in NESTED:
        records = _encoded(_lossy_encoders(sample, level, profile), sample, pool, sample.decoded)
        if level == NESTED[0]:
            tasks.append(_constriction(sample, profile, records))
        tasks += _lossy_tasks(sample, level, profile, records)
    return tasks


# ---- what there is without kvtool --------------------------------------------------------------------------------


def _plain_tasks(sample: Sample, pool: ThreadPoolExecutor) -> Iterator[Task]:
    raws = [
        _raw(side[layer]) for layer in range(sample.layers) for kv in sample.chunks for side in (kv.keys, kv.values)
    ]
    copies: list[Job] = [partial(np.copyto, np.zeros_like(raw), raw) for raw in raws]
    yield Task("memcpy", None, copies, sample.raw_bytes, sample.raw_bytes, SIDE, note="into memory that is there")
    copies = [partial(_copy_in_cache, raw) for raw in raws]
    note = "of what is in the cache into what is there"
    yield Task("memcpy in the cache", None, copies, sample.raw_bytes, sample.raw_bytes, SIDE, note=note)
    squeezed = list(pool.map(_zstd, raws))
    size = sum(map(len, squeezed))
    jobs: list[Job] = [partial(_zstd, raw) for raw in raws]
    yield Task("zstd -1 compress", None, jobs, sample.raw_bytes, size, SIDE)
    jobs = [partial(_unzstd, frame) for frame in squeezed]
    yield Task("zstd -1 decompress", None, jobs, sample.raw_bytes, size, SIDE)


def _raw(side: torch.Tensor) -> npt.NDArray[np.uint8]:
    return side.view(torch.uint8).numpy().reshape(-1)


def _copy_in_cache(like: npt.NDArray[np.uint8]) -> None:
    memory = _memory(2, len(like) // 2)
    np.copyto(memory[0], memory[1])


def _zstd(raw: npt.NDArray[np.uint8]) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw.data)


def _unzstd(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


def _constriction(sample: Sample, profile: Profile, records: Sequence[Encoded]) -> Task:
    """The symbols of level 1 at the middle layer of a chunk, decoded table by table: its quickest way."""
    layer = sample.layers // 2
    at = layer * len(sample.chunks)
    item = records[at]
    raw_bytes = 4 * sample.channels * item.shape[1]
    task = Task(CONSTRICTION, NESTED[0], [], raw_bytes, None, ONE, threaded=False)
    try:
        stream = importlib.import_module("constriction").stream
    except ImportError:
        return replace(task, note="not installed")
    jobs: list[Job] = []
    size = 0
    decoding = _decoding(profile, layer, [item])
    ids, tables = decoding.columns.ids, decoding.columns.tables
    numbers = np.empty((decoding.rows[0], len(ids)), np.int16)
    decode(Decoding(decoding.streams, in_order(ids, tables), [0], decoding.rows, numbers))
    for table in np.unique(ids):
        symbols = (numbers[:, ids == table].astype(np.int32) + ZERO).reshape(-1)
        share = tables.frequencies[table].astype(np.float32)
        model = stream.model.Categorical(np.maximum(share, 1e-9) / share.sum(), perfect=False)
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(symbols, model)
        words = coder.get_compressed()
        size += words.nbytes
        jobs.append(partial(_ans, stream, words, model, len(symbols)))
    return replace(task, jobs=jobs, bytes=size, note="one layer only")


def _ans(stream: Any, words: npt.NDArray[np.uint32], model: Any, count: int) -> Any:
    return stream.stack.AnsCoder(words).decode(model, count)


# ---- kvtool's levels ---------------------------------------------------------------------------------------------


def _lossless_tasks(sample: Sample, pool: ThreadPoolExecutor) -> Iterator[Task]:
    for level in (level for level in exact() if not LEVELS[level].verbatim):
        codec = CODECS[level]
        jobs: list[Job] = [partial(codec.encode_layers, _layers(kv)) for kv in sample.chunks]
        records = _encoded(jobs, sample, pool, sample.dtype)
        size = _size(records)
        yield Task("encode", level, jobs, sample.raw_bytes, size, CHUNK)
        jobs = [partial(codec.decode, batch, layer) for layer, batch in _batches(sample, records)]
        yield Task("decode", level, jobs, sample.raw_bytes, size, MANY)


def _layers(kv: ChunkKV) -> list[LayerKV]:
    return kv.layers


def _lossy_encoders(sample: Sample, level: str, profile: Profile) -> list[Job]:
    return [partial(CODECS[level].encode_layers, _layers(kv), profile) for kv in sample.chunks]


def _lossy_tasks(sample: Sample, level: str, profile: Profile, records: Sequence[Encoded]) -> Iterator[Task]:
    size, raw_bytes = _size(records), sample.raw_bytes
    yield Task("encode", level, _lossy_encoders(sample, level, profile), raw_bytes, size, CHUNK)
    batches = list(_batches(sample, records))
    jobs: list[Job] = []
    for layer, batch in batches:
        jobs.append(partial(_decode, _decoding(profile, layer, batch)))
    note = "to bfloat16, into memory in the cache, as the transform finds it; no transform"
    yield Task("entropy decode", level, jobs, raw_bytes, size, MANY, note=note)
    profiles = {profile.digest: profile}.__getitem__
    jobs = [partial(CODECS[level].decode, batch, layer, profiles) for layer, batch in batches]
    yield Task("decode", level, jobs, raw_bytes, size, MANY, note=f"to {NAMES[sample.decoded]}")
    jobs = [partial(CODECS[level].decode_layers, items, profiles) for items in _by_chunk(sample, records)]
    yield Task("decode by chunk", level, jobs, raw_bytes, size, CHUNK, note=f"to {NAMES[sample.decoded]}")
    coders = _entropy_encoders(sample, level, profile)
    yield Task("entropy encode", level, coders, raw_bytes, size, CHUNK, note="from the finest numbers; no transform")
    yield _backward_limit(sample, level, profile)


def _entropy_encoders(sample: Sample, level: str, profile: Profile) -> list[Job]:
    """Streams from numbers that are there: coarsened, made symbols, coded."""
    jobs: list[Job] = []
    for kv in sample.chunks:
        finest = []
        for layer, own in enumerate(kv.layers):
            sides = torch.stack(own).transpose(1, 2).flatten(2).float()
            finest.append(finest_numbers(profile.layout, profile.means[layer], profile.forward(layer), sides))
        jobs.append(partial(_streams, profile, level, np.stack(finest)))
    return jobs


def _streams(profile: Profile, level: str, numbers: npt.NDArray[np.int16]) -> list[Stream]:
    """Streams of a level, of the finest numbers `[layers, tokens, stride]`."""
    for step in range(int(level) - 1):
        numbers = wider(numbers, scratch(f"bench {step}", numbers.size, np.int16).reshape(numbers.shape))
    columns = [profile.coded(level, layer).alone for layer in range(len(numbers))]
    found = symbols_of(numbers, columns)
    return encode(*(Encoding(symbols, of) for (symbols, _), of in zip(found, columns, strict=True)))


def _decoding(profile: Profile, layer: int, items: Sequence[Encoded]) -> Decoding:
    """Streams of records of a layer straight to bfloat16, into memory that is yet to be named."""
    records = [Record.parse(item.payload) for item in items]
    columns, rows = profile.coded(str(records[0].level), layer).alone, [coded.tokens for coded in records]
    starts = [end - count for end, count in zip(accumulate(rows), rows, strict=True)]
    streams = [coded.streams[0] for coded in records]
    return Decoding(streams, columns, starts, rows, np.empty((0, 0), np.uint16), "bfloat16")


def _decode(job: Decoding) -> None:
    """Decode into this thread's memory."""
    decode(replace(job, out=_memory(sum(job.rows), job.columns.reach)))


_own = threading.local()


def _memory(rows: int, width: int) -> npt.NDArray[np.uint16]:
    """Return memory for numbers, the same for every call of a thread."""
    held: npt.NDArray[np.uint16] | None = getattr(_own, "held", None)
    if held is None or held.size < rows * width:
        held = _own.held = np.ones(rows * width, np.uint16)
    return held[: rows * width].reshape(rows, width)


def _forward_limit(sample: Sample, profile: Profile) -> Task:
    """The products that encoding begins with, in float32, and nothing else."""
    layout = profile.layout
    ones = torch.ones((max(sample.shape(chunk)[1] for chunk in range(len(sample.chunks))), layout.size))
    jobs: list[Job] = []
    for layer in range(sample.layers):
        bases = profile.forward(layer).flatten(0, 1)
        for chunk in range(len(sample.chunks)):
            taken = ones[: sample.shape(chunk)[1]]
            jobs.append(partial(_products, [(taken, basis) for basis in bases]))
    flops = 2 * sample.layers * sample.tokens * SIDES * sample.channels * layout.size
    note = "plain float32 products of the transform's shapes"
    return Task("transform limit, encode", None, jobs, sample.raw_bytes, None, ONE, flops=flops, note=note)


def _backward_limit(sample: Sample, level: str, profile: Profile) -> Task:
    """The products that decoding ends with, in the format that is fast here, and nothing else."""
    kind = product_dtype(NAMES[sample.decoded])
    dtype = DTYPES[kind]
    layout = profile.layout
    ones = torch.ones((sample.tokens, layout.padded), dtype=dtype)
    jobs: list[Job] = []
    flops = 0
    for layer in range(sample.layers):
        widths = profile.coded(level, layer).widths
        bases = profile.backward(layer, level, dtype)[0].flatten(0, 1)
        for batch in sample.batches():
            tokens = sum(sample.shape(chunk)[1] for chunk in batch)
            pairs = [(ones[:tokens, :width], basis[:width]) for width, basis in zip(widths, bases, strict=True)]
            jobs.append(partial(_products, pairs))
            flops += 2 * tokens * sum(widths) * layout.size
    note = f"plain {kind} products of the transform's shapes"
    return Task("transform limit, decode", level, jobs, sample.raw_bytes, None, MANY, flops=flops, note=note)


def _products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for numbers, basis in pairs:
        torch.mm(numbers, basis)


# ---- records -----------------------------------------------------------------------------------------------------


def _encoded(jobs: Sequence[Job], sample: Sample, pool: ThreadPoolExecutor, dtype: torch.dtype) -> list[Encoded]:
    """Records of every layer of every chunk, layer by layer, to be decoded to `dtype`; a job makes those of one."""
    chunks = list(pool.map(lambda job: [b"".join(parts) for parts in job()], jobs))
    shapes = [sample.shape(chunk) for chunk in range(len(sample.chunks))]
    return [
        Encoded(payload, shape, NAMES[dtype])
        for payloads in zip(*chunks, strict=True)
        for payload, shape in zip(payloads, shapes, strict=True)
    ]


def _batches(sample: Sample, records: Sequence[T]) -> Iterator[tuple[int, list[T]]]:
    """Layer, and what there is at it of the chunks that are decoded together."""
    for layer in range(sample.layers):
        for batch in sample.batches():
            yield layer, [records[layer * len(sample.chunks) + chunk] for chunk in batch]


def _by_chunk(sample: Sample, records: Sequence[T]) -> list[list[T]]:
    """All layers of each chunk."""
    count = len(sample.chunks)
    return [[records[layer * count + chunk] for layer in range(sample.layers)] for chunk in range(count)]


def _size(records: Sequence[Encoded]) -> int:
    return sum(len(record.payload) + OVERHEAD_BYTES for record in records)
