"""Records of every level from chunks just prefilled: GB/s of raw numbers, and the fit of a profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtool.core.codec.levels import WHOLE, level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.records.encode import encode_layers
from samples.benchmarks.bench.prompts import Sizes, fit_to, random_text
from samples.benchmarks.gpu_day import shapes
from samples.benchmarks.gpu_day.day import Day


def run(day: Day) -> None:
    shape = shapes.shapes(day)[0]
    made: list[tuple[list[ChunkKV], Profile]] = []

    def prepared() -> tuple[list[ChunkKV], Profile]:
        """Made by the first step that needs it: a resumed call may need none."""
        if not made:
            decoder = shapes.decoder(day, shape)
            kvs = _prefilled(day, decoder)
            made.append((kvs, fit_to(decoder, kvs)))
        return made[0]

    day.step(f"{shape}, prefill and fit", lambda: _fitted(day, shape), least_s=2 if day.dry else 60)
    for level in WHOLE:
        day.step(f"{shape}, level {level}", partial(_encoded, prepared, level), least_s=2 if day.dry else 40)


def _prefilled(day: Day, decoder: Decoder) -> list[ChunkKV]:
    sizes = Sizes((200,), 64, 32) if day.dry else Sizes((2100,), 512, 32)
    text = random_text(decoder.config.vocab_size, sizes, shapes.SEED)
    items = [PrefillItem(ids) for ids in text.chunks(sizes.contexts[0])]
    return prefill_chunks(decoder, LeadIn(decoder, text.lead_in), items)


def _fitted(day: Day, shape: str) -> dict[str, float]:
    decoder = shapes.decoder(day, shape)
    _prefilled(day, decoder)
    started = time.perf_counter()
    kvs = _prefilled(day, decoder)
    prefilled = time.perf_counter()
    fit_to(decoder, kvs)
    return {
        "prefill_tokens_per_s": sum(kv.tokens for kv in kvs) / (prefilled - started),
        "fit_s": time.perf_counter() - prefilled,
    }


def _encoded(prepared: Callable[[], tuple[list[ChunkKV], Profile]], level: str) -> dict[str, Any]:
    kvs, profile = prepared()
    given = profile if level_of(level).nested else None
    encode_layers(bytes(16), kvs[0], level, given)
    started = time.perf_counter()
    records = [encode_layers(bytes([number]) * 16, kv, level, given) for number, kv in enumerate(kvs)]
    seconds = time.perf_counter() - started
    raw = sum(kv.nbytes for kv in kvs)
    return {
        "gb_per_s": raw / seconds / 1e9,
        "share_of_raw": sum(len(one) for layers in records for one in layers) / raw,
    }
