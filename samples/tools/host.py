"""The host's own path of ingest and loading, with a null device in place of the model: how fast is all but arithmetic?

    python samples/tools/host.py --shape qwen3-0.6b --tokens 20000 --store DIR
    python samples/tools/host.py --shape llama-3.1-8b --tokens 20000 --store DIR --level 2 --profile

The null device gives keys and values of a model's shape out of one block of random numbers: it has no weights and
computes nothing, or waits as long as a model of `--prefill` tokens a second would compute. Everything else is
kvtool's own: batches, taking over, sensitivities, records with their digests, transactions, and reading, checking and
placing for a prompt. Next to each: what this machine copies, hashes, reads from the page cache and writes to the disk
in the same run. DIR is made, and emptied of the store afterwards. `--profile` says in which functions the time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash

from kvtool.core.cache.entries import ChunkRef, ChunkSpec, DocumentEntry, FileEntry
from kvtool.core.cache.identity import chunk_id, ids_digest
from kvtool.core.cache.store import Store
from kvtool.core.codec.base import Profiles, no_profiles
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.machine import Arithmetic
from kvtool.core.common.types import Events, Ids
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.source import StoreSource
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.report import Account
from kvtool.core.ingest.storer import BATCH_TOKENS, ChunkStorer
from kvtool.core.ingest.survey import PreparedFile
from kvtool.core.kernels.rope import CopyWithRope, CosSin, copy_with_rope
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import Pass
from kvtool.core.model.prefill import ChunkKV, LeadIn
from kvtool.core.model.prompt_cache import BufferLayer, KVShape, PromptCache
from kvtool.core.model.stack import Turns
from kvtool.core.native.isa import isa_here
from kvtool.core.records.encode import LeadIns
from kvtool.core.session.identity import ProfileCache
from samples.benchmarks.bench.prompts import fit_to

NULL = "meta"  # the device of torch that has neither memory nor arithmetic
SHAPES = {  # layers, and keys and values of each
    "tiny": (2, KVShape(2, 16, 16)),
    "qwen3-0.6b": (28, KVShape(8, 128, 128)),
    "llama-3.1-8b": (32, KVShape(8, 128, 128)),
}
CHUNKS_A_FILE, QUESTION, VOCABULARY, SEED = 8, 32, 50_000, 0
LEAST, BLOCK = 1 << 28, 48 << 20  # bytes that a limit is measured with, and of a write
AHEAD = 4  # batches whose memory is there from the start
_LOOK_S = 0.002
_UNUSED = 3  # references to memory that only the list of it has, as a look at it counts them


# ---- the null device ----


@dataclass
class Rotation:
    """A rotation by halves with the product's machine code; a device that is none takes nothing."""

    width: int
    by_kernel = False

    def table(self, positions: torch.Tensor) -> CosSin:
        angles = positions.float()[:, None] * torch.logspace(0, -4, self.width // 2, device=positions.device)
        cos, sin = (side.repeat(1, 2)[None] for side in (angles.cos(), angles.sin()))
        return CosSin(cos, sin)

    def rotate(self, keys: torch.Tensor, table: object, layer: int) -> torch.Tensor:
        return keys

    def place(self, turns: Sequence[Any], beside: Sequence[Any], layer: int) -> None:
        moves = [CopyWithRope(out[0], keys[0], table) for out, keys, table in turns if not out.is_meta]
        moves += [CopyWithRope(out[0], values[0]) for out, values in beside if not out.is_meta]
        isa = isa_here()
        if isa is None or not copy_with_rope(moves, isa):
            for move in moves:
                move.to.copy_(move.numbers)


@dataclass
class NullDevice:
    """What ingest and loading ask a decoder for.

    Attributes
    ----------
    prefill : tokens a second; None: no time at all.
    taken : bytes of keys and values that were handed over.
    asked : bytes of memory that they were taken over into.
    seconds : CPU time of that, which a GPU's copies do not take of the host's.
    """

    layer_count: int
    shape: KVShape
    batch: int
    prefill: float | None = None
    device: str = NULL
    taken: int = 0
    asked: int = 0
    seconds: float = 0.0
    kv_dtype: torch.dtype = torch.bfloat16
    context: int = 1 << 20
    layers: tuple[torch.nn.Module, ...] = ()
    turns: Turns = field(default_factory=Turns)

    def __post_init__(self) -> None:
        BATCH_TOKENS[NULL] = self.batch
        torch.manual_seed(SEED)
        shape = (1, self.shape.heads, self.batch, self.shape.key_dim)
        self._kv = torch.randn(shape, dtype=self.kv_dtype), torch.randn(shape, dtype=self.kv_dtype)
        self.shapes = (self.shape,) * self.layer_count
        self.stored_layers = self.layer_count
        self.forward = self
        self.rotary = Rotation(self.shape.key_dim)
        self._memory: list[np.ndarray[Any, Any]] = []
        self.loaded = SimpleNamespace(arithmetic=Arithmetic("bfloat16", "cuda"))

    @classmethod
    def of(cls, name: str, batch: int, prefill: float | None = None) -> NullDevice:
        return cls(*SHAPES[name], batch, prefill)

    @property
    def token_bytes(self) -> int:
        return self.layer_count * self.shape.numbers * self.kv_dtype.itemsize

    def keep(self, batches: int, chunk_tokens: int) -> None:
        """Have the memory of so many batches from the start."""
        room = self.token_bytes // self.layer_count * self.batch + 1024 * (self.batch // chunk_tokens + 2)
        kept = [self.host_memory(room) for _ in range(batches * self.layer_count)]
        del kept

    def host_memory(self, size: int) -> torch.Tensor:
        """Memory that nothing uses any more, as torch keeps it pinned for a GPU; else new."""
        self.asked += size
        for held in self._memory:
            if held.size >= size and sys.getrefcount(held) == _UNUSED:
                return torch.from_numpy(held[:size])
        self._memory.append(np.ones(size, np.uint8))
        return torch.from_numpy(self._memory[-1])

    def device_ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(tokens))

    def fill(self, job: Pass) -> None:
        """Hand over keys and values of all layers, as a model's forward does."""
        tokens, began = len(job.ids), time.thread_time()
        keys, values = (side[:, :, :tokens] for side in self._kv)
        for layer in range(self.layer_count):
            if self.prefill:
                time.sleep(tokens / self.prefill / self.layer_count)
            self.taken += keys.nbytes + values.nbytes
            job.on_layer.collect(layer, keys, values)
            self.seconds += time.thread_time() - began
            began = time.thread_time()

    def cache(self, tokens: int) -> PromptCache:
        return PromptCache([BufferLayer(shape, tokens, self.kv_dtype, self.device) for shape in self.shapes])

    def profile(self, tokens: int) -> Profile:
        """Fit a codec's profile to its numbers."""
        keys, values = (side[0, :, :tokens] for side in self._kv)
        return fit_to([ChunkKV([keys] * self.layer_count, [values] * self.layer_count)])


# ---- ingest ----


def files_of(tokens: int, chunk_tokens: int) -> list[PreparedFile]:
    """Files of random chunks, as the reader gives them."""
    draw = np.random.default_rng(SEED)
    chunks = [_chunk(draw, min(chunk_tokens, tokens - at)) for at in range(0, tokens, chunk_tokens)]
    return [
        _file(f"file-{at}", chunks[at : at + CHUNKS_A_FILE], chunk_tokens)
        for at in range(0, len(chunks), CHUNKS_A_FILE)
    ]


def _chunk(draw: np.random.Generator, tokens: int) -> ChunkSpec:
    ids: Ids = tuple(draw.integers(VOCABULARY, size=tokens).tolist())
    lead_in = ids_digest(())
    name = chunk_id(namespace="host", model_fingerprint="null", lead_in=lead_in, token_ids=ids)
    return ChunkSpec(name, ids, (), lead_in)


def _file(name: str, chunks: Sequence[ChunkSpec], tokens: int) -> PreparedFile:
    refs = tuple(ChunkRef(one.chunk_id, at * tokens, (at + 1) * tokens, tokens) for at, one in enumerate(chunks))
    document = DocumentEntry(name, "text", "x" * (len(chunks) * tokens), refs)
    return PreparedFile(FileEntry(name, 1, 2, "", "", (name,)), (document,), tuple(chunks), is_new=True)


def ingest(
    store: Store, device: NullDevice, files: Sequence[PreparedFile], level: str = RAW, profile: Profile | None = None
) -> Account:
    """Store files as `kvtool ingest` does."""
    decoder: Decoder = device  # type: ignore[assignment]
    account = Account(IngestOptions(), Events())
    nothing = LeadIn(decoder, ())
    with store.writer() as writer, torch.inference_mode():
        if profile is not None:
            writer.put_profile(profile.digest, profile.data, {"profile": profile.digest.hex()})
        storer = ChunkStorer(writer, account, decoder, LeadIns(nothing, nothing), level, profile)
        try:
            for file in files:
                storer.take(file, file.chunks)
            storer.finish()
        finally:
            storer.close()
    return account


# ---- loading ----


def plan_of(files: Sequence[PreparedFile], level: str = RAW) -> Plan:
    """The prompt of all chunks, and a question."""
    empty = Candidate((), lead_in=ids_digest([]), reason="empty")
    chunks = [Candidate(one.ids, one.chunk_id, one.lead_in, level) for file in files for one in file.chunks]
    return build_plan(empty, chunks, range(QUESTION))


def load(
    store: Store,
    device: NullDevice,
    plan: Plan,
    cache: PromptCache,
    profiles: Profiles = no_profiles,
    workers: int | None = None,
) -> int:
    """Load all records of a plan into a cache, as a question does; returns their bytes."""
    decoder: Decoder = device  # type: ignore[assignment]
    with (
        store.view(),
        Loader(decoder, plan.cached, cache, StoreSource(store, decoder, profiles), None, workers) as loader,
    ):
        for layer in range(device.layer_count):
            loader.wait(layer)
        return loader.stats.bytes_read


# ---- what the machine can ----


def limits(folder: Path, total: int) -> dict[str, float]:
    """GB/s of this machine, now: each byte counts once.

    memcpy: into memory that is there; `fresh`: into memory that is not; `cached`: a file read from the page cache;
    `disk`: blocks written, each durable; `disk_once`: all of them, durable at the end.
    """
    source, target = (np.ones(LEAST, np.uint8) for _ in range(2))
    half = LEAST // 2

    def copy(part: slice) -> None:
        np.copyto(target[part], source[part])

    with ThreadPoolExecutor(2) as pool:
        two = _speed(LEAST, lambda: list(pool.map(copy, (slice(0, half), slice(half, LEAST)))))
    path = folder / "limit"
    try:
        once = max(total // BLOCK, 1)
        _write(path, source[:BLOCK], once, each=False)  # a virtual machine's memory may come late: not timed
        disk = _speed(once * BLOCK, lambda: _write(path, source[:BLOCK], once, each=True), 1)
        disk_once = _speed(once * BLOCK, lambda: _write(path, source[:BLOCK], once, each=False), 1)
        with path.open("rb", buffering=0) as file:
            block = memoryview(target)[:BLOCK]
            cached = _speed(BLOCK, lambda: os.preadv(file.fileno(), [block], 0), 9)
    finally:
        path.unlink(missing_ok=True)
    return {
        "memcpy": _speed(LEAST, lambda: copy(slice(0, LEAST))),
        "memcpy_2": two,
        "fresh": _speed(LEAST, lambda: source.copy()),
        "xxh3": _speed(LEAST, lambda: xxhash.xxh3_128_digest(source)),
        "cached": cached,
        "disk": disk,
        "disk_once": disk_once,
    }


def _write(path: Path, block: np.ndarray[Any, Any], count: int, each: bool) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block.data)
            if each:
                os.fdatasync(file.fileno())
        os.fdatasync(file.fileno())


def _speed(size: int, work: Callable[[], object], times: int = 3) -> float:
    """GB/s, the best of some times."""
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return size / best / 1e9


# ---- where the time goes ----


@contextmanager
def sampled(wanted: bool) -> Iterator[Counter[str]]:
    """Count seconds of CPU time by the innermost function of kvtool that each thread is in, and by thread, in brackets.

    A function that keeps Python's lock is looked at when it gives it back, and counts for all of the time until then.
    """
    seconds, spent, ended = Counter[str](), dict[int, float](), threading.Event()

    def look() -> None:
        names = {thread.ident: thread.name.rstrip("0123456789_-") for thread in threading.enumerate()}
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                now = time.clock_gettime(time.pthread_getcpuclockid(thread))
                for key in (_place(frame), f"[{names.get(thread, 'another thread')}]"):
                    seconds[key] += now - spent.get(thread, 0.0)  # type: ignore[assignment]
                spent[thread] = now

    def looks() -> None:
        while not ended.wait(_LOOK_S):
            look()
        look()

    thread = threading.Thread(target=looks, daemon=True)
    if wanted:
        spent |= {one: time.clock_gettime(time.pthread_getcpuclockid(one)) for one in sys._current_frames()}
        thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        if wanted:
            thread.join()


def _place(frame: Any) -> str:
    while frame is not None and "kvtool/core" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "(other)" if frame is None else f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"


# ---- the measurement ----


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ingest and load; rows of GB/s (of raw keys and values) with the limits before and after."""
    device = NullDevice.of(options.shape, options.batch, options.prefill)
    device.keep(AHEAD, options.chunk_tokens)
    files = files_of(options.tokens, options.chunk_tokens)
    profile = device.profile(min(1024, options.batch)) if level_of(options.level).nested else None
    timer = Timer(device, sum(len(chunk.ids) for file in files for chunk in file.chunks), options.profile)
    folder = Path(options.store)
    folder.mkdir(parents=True, exist_ok=True)
    path, plan = folder / "store", plan_of(files, options.level)
    before = limits(folder, timer.size)
    try:
        with Store.create_or_open(path) as store:
            with timer.timed("ingest"):
                ingest(store, device, files, options.level, profile)
            profiles = ProfileCache(store)
            for device.device, name in ((NULL, "load for a device"), ("cpu", "load, placed in main memory")):
                cache = device.cache(plan.length)
                for number in range(options.repeat + 1):
                    with timer.timed(name if number else ""):
                        load(store, device, plan, cache, profiles, options.workers)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    about = {"shape": options.shape, "level": options.level, "tokens": timer.tokens, "gb": timer.size / 1e9}
    return about | {"limits": before, "limits after": limits(folder, timer.size), "rows": timer.rows}


@dataclass
class Timer:
    """Rows of what was timed, for so many tokens; `sampled`: with the functions in which CPU time was spent."""

    device: NullDevice
    tokens: int
    sampled: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.tokens * self.device.token_bytes

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Time what is done inside; "": without a row."""
        self.device.seconds = 0.0
        with sampled(self.sampled) as seconds:
            started, spent = time.perf_counter(), time.process_time()
            yield
            took, spent = time.perf_counter() - started, time.process_time() - spent
        row = {"what": what, "tokens_s": self.tokens / took, "gb_s": self.size / took / 1e9}
        row["cpu_s_gb"] = (spent - self.device.seconds) / self.size * 1e9
        row["places"] = {place: of / spent for place, of in seconds.most_common(16)}
        self.rows += [row] if what else []


def show(found: dict[str, Any]) -> None:
    print(f"{found['shape']}, level {found['level']}: {found['tokens']} tokens, {found['gb']:.2f} GB")
    either = [found["limits"], found["limits after"]]
    for name, limit in zip(("before", "after"), either, strict=True):
        print(f"  limits {name}, GB/s:", ", ".join(f"{key} {value:.2f}" for key, value in limit.items()))
    mean = {key: (either[0][key] + either[1][key]) / 2 for key in either[0]}
    for row in found["rows"]:
        limit = (
            min(mean["memcpy"], mean["disk_once"]) if row["what"] == "ingest" else min(mean["memcpy"], mean["cached"])
        )
        print(
            f"  {row['what']}: {row['tokens_s']:,.0f} tokens/s, {row['gb_s']:.2f} GB/s, {row['gb_s'] / limit:.0%} "
            f"of the limit, CPU {row['cpu_s_gb']:.2f} s/GB"
        )
        for place, share in row["places"].items():
            print(f"      {share:6.1%}  {place}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4096, help="tokens of a batch")
    parser.add_argument("--store", required=True, metavar="DIR", help="a folder on the disk to be measured")
    parser.add_argument("--level", default=RAW)
    parser.add_argument("--prefill", type=float, help="tokens a second of the device (default: at once)")
    parser.add_argument("--workers", type=int, help="loading threads (default: as a question takes)")
    parser.add_argument("--repeat", type=int, default=2, help="times that loading is measured")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = measure(options)
    print(json.dumps(found, indent=1)) if options.json else show(found)


if __name__ == "__main__":
    main()
