"""Decoding speed, token by token: each stepper, and the bytes that it has to read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.common.types import Events
from kvtool.core.errors import UsageError
from kvtool.core.model.decode import DecodeBackend, TorchBackend, decode_backend
from kvtool.core.model.decode.native import compiled_model
from kvtool.core.model.prompt_cache import PromptCache
from samples.benchmarks.bench.machine import Host, copied_bytes_per_s

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

STEPPERS = ("native", "torch")
INCLUDES = (
    "a step is one token through the whole model after a cache of random tokens, logits included; steppers take "
    "turns, token by token, and medians are shown. bytes: weights and the cache's rows, each read once."
)
_PREFILLED = 512  # tokens


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of the measurement: the tokens before the first step, and the number of steps."""

    context: int
    new_tokens: int
    steppers: tuple[str, ...]


@torch.inference_mode()
def bench_decode(decoder: Decoder, options: DecodeOptions, events: Events) -> dict[str, Any]:
    """Measure the steppers of a model.

    Returns
    -------
    The JSON of `bench decode`. `make_ms`: until the machine code of a new model was there, for the instruction set
    `isa`. `matrices`: kinds of its matrices, as their layouts are named. `kl_max`, `apart_max`: of the logits of all
    steps, native against the model's own forward: nats, and the largest difference.

    Raises
    ------
    UsageError : the context is longer than the model takes.
    """
    decoder.check_length(options.context + options.new_tokens, "take a shorter --context")
    events.status("make the machine code")
    started = time.perf_counter()
    compiled = compiled_model(decoder)
    make_ms = (time.perf_counter() - started) * 1e3
    notes = [f"no native steps: {compiled}"] if isinstance(compiled, str) else []
    found = None if isinstance(compiled, str) else compiled
    names = [name for name in options.steppers if name != "native" or found is not None]
    if not names:
        raise UsageError(f"there are no native steps of this model: {compiled}", "--stepper torch")
    run = _Run(decoder, names, options)
    run.all(events)
    memcpy = copied_bytes_per_s()
    kv_bytes = decoder.kv_bytes(options.context)
    read = None if found is None else found.weights_bytes + kv_bytes
    return {
        "resolved": {"model": decoder.loaded.files.ref, "device": decoder.device, "dtype": decoder.loaded.dtype},
        "context": options.context,
        "new_tokens": options.new_tokens,
        "host": Host.here().to_json(),
        "isa": None if found is None else str(found.isa),
        "make_ms": None if found is None else make_ms,
        "matrices": [] if found is None else [*found.kinds],
        "weights_bytes": None if found is None else found.weights_bytes,
        "kv_bytes": kv_bytes,
        "memcpy_bytes_per_s": memcpy,
        "kl_max": run.kl_max,
        "apart_max": run.apart_max,
        "rows": [_row(name, run.times[name], read if name == "native" else None, memcpy) for name in names],
        "notes": notes,
        "includes": INCLUDES,
    }


def _row(name: str, times: Sequence[tuple[float, float]], read: int | None, memcpy: float) -> dict[str, Any]:
    """Make a stepper's row. `bytes_per_s`: of weights and cache; `copy_share`: of what a copy reads and writes."""
    first, *later = times
    step, processor = (statistics.median(column) for column in zip(*(later or times), strict=True))
    rate = None if read is None else read / step
    return {
        "stepper": name,
        "tokens_per_second": 1 / step,
        "step_ms": step * 1e3,
        "step_cpu_ms": processor * 1e3,
        "first_step_ms": first[0] * 1e3,
        "bytes_per_s": rate,
        "copy_share": None if rate is None else rate / (2 * memcpy),
    }


class _Run:
    """Steps of all steppers, each on a cache of its own."""

    def __init__(self, decoder: Decoder, names: Sequence[str], options: DecodeOptions) -> None:
        self._options, self._vocabulary = options, int(decoder.config.vocab_size)
        self._steppers = {name: _stepper(name, decoder, filled_cache(decoder, options)) for name in names}
        self.times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        self.kl_max: float | None = None
        self.apart_max: float | None = None

    def all(self, events: Events) -> None:
        """Take every step with each of them in turn."""
        chance = torch.Generator().manual_seed(1)
        for token in torch.randint(self._vocabulary, (self._options.new_tokens,), generator=chance).tolist():
            events.status("decode")
            logits = {name: self._timed(name, token) for name in self._steppers}
            if len(logits) == len(STEPPERS):
                self._compare(logits["torch"], logits["native"])
            events.advance(1)

    def _timed(self, name: str, token: int) -> torch.Tensor:
        began, processor = time.perf_counter(), time.process_time()
        logits = self._steppers[name].step(token)
        self.times[name].append((time.perf_counter() - began, time.process_time() - processor))
        return logits

    def _compare(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        p, q = (logits.double().log_softmax(-1) for logits in (expected, found))
        self.kl_max = max(self.kl_max or 0.0, float((p.exp() * (p - q)).sum()))
        self.apart_max = max(self.apart_max or 0.0, float((expected - found).abs().max()))


def _stepper(name: str, decoder: Decoder, cache: PromptCache) -> DecodeBackend:
    return decode_backend(decoder, cache) if name == "native" else TorchBackend(decoder, cache)


def filled_cache(decoder: Decoder, options: DecodeOptions) -> PromptCache:
    """Make a cache of random tokens' rows, the first ones over and over: a step takes as long whatever they are."""
    count = min(options.context, _PREFILLED)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(int(decoder.config.vocab_size), (count,), generator=chance).tolist()
    _, first = decoder.prefill(ids)
    cache = decoder.new_cache(options.context + options.new_tokens)
    cache.set_length(options.context)
    again = torch.arange(options.context) % count
    for buffer, rows in zip(cache.buffers, first.buffers, strict=True):
        for side, known in zip(buffer.view(), rows.view(), strict=True):
            torch.index_select(known, 2, again.to(known.device), out=side)
    return cache
