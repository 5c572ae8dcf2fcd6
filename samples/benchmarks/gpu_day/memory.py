"""Memory of the passes on top of the model: ingest's batches, full prefill, and the capture of a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvtool.core.ingest.storer import batch_tokens
from kvtool.core.model.decode import decode_backend
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from samples.benchmarks.gpu_day import shapes
from samples.benchmarks.gpu_day.day import Day
from samples.benchmarks.peak_memory import peak_memory


def run(day: Day) -> None:
    for shape in shapes.shapes(day):
        for context in shapes.contexts(day):
            day.step(
                f"{shape}, {context} tokens", partial(_measured, day, shape, context), least_s=2 if day.dry else 30
            )


def _measured(day: Day, shape: str, context: int) -> dict[str, Any]:
    decoder = shapes.decoder(day, shape)
    length = min(context, decoder.context - 64)
    ids = torch.randint(decoder.config.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = [ids[start : start + 512] for start in range(0, min(length, batch_tokens(day.device)), 512)]

    def answered() -> None:
        backend = decode_backend(decoder, decoder.prefill(ids, 16)[1])
        for token in range(5):
            backend.step(token)

    works: dict[str, Callable[[], object]] = {
        "full prefill": lambda: decoder.prefill(ids),
        "prefill and 5 steps": answered,
        "a batch of ingest": lambda: prefill_chunks(
            decoder, LeadIn(decoder, ids[:64]), [PrefillItem(tuple(one)) for one in batch]
        ),
    }
    peaks = {name: _peak(decoder, work) for name, work in works.items()}
    model = sum(weight.nbytes for weight in decoder.model.parameters())
    return {"context": length, "model_bytes": model, "kv_bytes": decoder.kv_bytes(length)} | peaks


def _peak(decoder: Decoder, work: Callable[[], object]) -> int | None:
    with peak_memory(decoder.device) as peak:
        work()
    return peak.bytes
