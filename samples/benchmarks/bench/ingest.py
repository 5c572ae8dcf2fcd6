"""Ingest speed, next to plain batched prefill of the same chunks."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.cache.entries import ChunkSpec, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import RAW
from kvtool.core.common.types import Events
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.report import Account
from kvtool.core.ingest.storer import ChunkStorer, batch_tokens
from kvtool.core.ingest.stream import NewChunks
from kvtool.core.ingest.survey import PreparedFile
from kvtool.core.model.decoder import Decoder
from kvtool.core.session.identity import StoreIdentity, lead_ins_of
from samples.benchmarks.bench.machine import Host
from samples.benchmarks.bench.plain import attention_of_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator


def files_of(store: Store, identity: StoreIdentity, most_tokens: int) -> list[PreparedFile]:
    """The store's first documents as if they were new, `most_tokens` tokens at most (one document at least)."""
    files: list[PreparedFile] = []
    tokens = 0
    for document in store.documents():
        infos = [store.chunk_info(ref.chunk_id) for ref in document.chunks]
        ids = [info.token_ids for info in infos if info is not None]
        tokens += sum(map(len, ids))
        if files and tokens > most_tokens:
            break
        entry = FileEntry(document.source, 0, 0, "", "", (document.source,))
        chunks = [ChunkSpec(identity.chunk_id(own), own, (), identity.lead_in.digest()) for own in ids]
        files.append(PreparedFile(entry, (document,), tuple(chunks), is_new=True))
    return files


def passes(repeat: int) -> int:
    """Return the number of passes: the work of a progress bar."""
    return 2 * (repeat + 1)


def bench_ingest(
    decoder: Decoder, identity: StoreIdentity, files: Sequence[PreparedFile], repeat: int, events: Events
) -> dict[str, Any]:
    """Measure both on the chunks of these files, in rounds that alternate, after one round that is not counted.

    Returns
    -------
    The JSON of `bench ingest`. Numbers are medians over the rounds. `plain_tokens_per_second`: `transformers`' own
    forward over the same chunks, padded in batches of similar length and of as many tokens, without lead-in, LM head
    and disk. `ingest_tokens_per_second`: prefill after the lead-in, un-rotation, records, digests and durable commits
    into a new store. `speedup`: plain seconds / ingest seconds.
    """
    wanted = list({chunk.chunk_id: chunk for file in files for chunk in file.chunks}.values())
    tokens = sum(len(chunk.ids) for chunk in wanted)
    ways = {"plain prefill": lambda: _plain(decoder, wanted), "ingest": lambda: _ingest(decoder, identity, files)}
    rounds = []
    for number in range(repeat + 1):
        times = []
        for name, work in ways.items():
            events.status(f"{tokens} tokens, {name}{'' if number else ', not counted'}")
            times.append(_seconds(work))
            events.advance(1)
        rounds.append(times)
    del rounds[0]
    return {
        "chunks": len(wanted),
        "tokens": tokens,
        "lead_in": identity.lead_in.mode,
        "lead_in_tokens": len(identity.lead_in.ids),
        "repeat": repeat,
        "plain_tokens_per_second": tokens / statistics.median(plain for plain, _ in rounds),
        "ingest_tokens_per_second": tokens / statistics.median(ours for _, ours in rounds),
        "speedup": statistics.median(plain / ours for plain, ours in rounds),
        "host": Host.here().to_json(),
    }


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@torch.inference_mode()
def _plain(decoder: Decoder, wanted: Sequence[ChunkSpec]) -> None:
    with attention_of_transformers(decoder):
        for batch in _of_similar_length(wanted, batch_tokens(decoder.device)):
            width = max(len(chunk.ids) for chunk in batch)
            ids = torch.zeros((len(batch), width), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, chunk in enumerate(batch):
                ids[row, : len(chunk.ids)] = torch.tensor(chunk.ids)
                mask[row, : len(chunk.ids)] = 1
            decoder.base(input_ids=ids.to(decoder.device), attention_mask=mask.to(decoder.device), use_cache=True)
    if decoder.device.startswith("cuda"):
        torch.cuda.synchronize()


def _of_similar_length(wanted: Sequence[ChunkSpec], tokens: int) -> Iterator[list[ChunkSpec]]:
    """Batches with little padding; one holds at most `tokens` padded tokens, or one longer chunk."""
    batch: list[ChunkSpec] = []
    for chunk in sorted(wanted, key=lambda chunk: len(chunk.ids)):
        if batch and len(chunk.ids) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _ingest(decoder: Decoder, identity: StoreIdentity, files: Sequence[PreparedFile]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvtool-bench-") as folder,
        Store.create_or_open(Path(folder) / "store") as store,
        store.writer() as writer,
    ):
        account, new_chunks = Account(IngestOptions(), Events()), NewChunks(store)
        storer = ChunkStorer(writer, account, decoder, lead_ins_of(identity, decoder), RAW, None)
        try:
            for file in files:
                storer.take(file, new_chunks.of(file))
            storer.finish()
        finally:
            storer.close()
