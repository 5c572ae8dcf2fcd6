"""Decoding of answers: milliseconds a token by the model's forward, by a captured graph, and what memory allows."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch

from kvtool.core.common.machine import ATTENTION
from kvtool.core.model.decode import DecodeBackend, TorchBackend
from kvtool.core.model.decode.cuda_graph import CudaGraphBackend, StaticStep
from kvtool.core.model.decoder import Decoder
from samples.benchmarks.bench.machine import measure_machine, synchronize
from samples.benchmarks.gpu_day import shapes
from samples.benchmarks.gpu_day.day import Day


def run(day: Day) -> None:
    for shape in shapes.shapes(day):
        for context in (60,) if day.dry else (1024, 16384):
            day.step(
                f"{shape}, {context} tokens", partial(_measured, day, shape, context), least_s=2 if day.dry else 30
            )


def _measured(day: Day, shape: str, context: int) -> dict[str, Any]:
    decoder = shapes.decoder(day, shape)
    ids = torch.randint(decoder.config.vocab_size, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    count = 6 if day.dry else 64
    weights = sum(weight.nbytes for weight in decoder.model.parameters())
    read = weights + decoder.kv_bytes(context)
    machine = measure_machine(decoder)
    found: dict[str, Any] = {"bytes_a_token": read, "limit_ms": read / machine.weights_bytes_per_s * 1e3}
    exact, found["plain"] = _stepped(decoder, ids, count, "plain", "")
    for how, kernel in _ways(day):
        name = f"{how} {kernel}".strip()
        try:
            tokens, found[name] = _stepped(decoder, ids, count, how, kernel)
        except Exception as error:  # the other ways are worth having
            if "CUDA error" in str(error):
                raise
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        found[name]["largest_difference"] = float((tokens - exact).abs().max() / exact.std())
    return found


def _ways(day: Day) -> list[tuple[str, str]]:
    """List pairs of a way to take a step and an attention kernel; without a GPU no graph can be captured."""
    ways = [("static", "")]
    return [*ways, ("graph", "sdpa"), ("graph", "triton")] if day.device.startswith("cuda") else ways


def _stepped(
    decoder: Decoder, ids: list[int], count: int, how: str, kernel: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the last step, and times: of the first three steps, and of one of the others."""
    os.environ[ATTENTION] = kernel  # only of this way: the next one sets its own
    _, cache = decoder.prefill(ids, count)
    backend: Any = {"plain": TorchBackend, "graph": CudaGraphBackend, "static": _Static}[how](decoder, cache)
    synchronize(decoder.device)
    started = time.perf_counter()
    for token in range(3):
        logits = backend.step(token)
    int(logits.argmax())
    begun = time.perf_counter()
    for token in range(3, count):
        logits = backend.step(token)
        int(logits.argmax())
    ended = time.perf_counter()
    found = {"first_3_ms": (begun - started) * 1e3, "ms_a_token": (ended - begun) * 1e3 / (count - 3)}
    return logits.float().cpu(), found | _said(backend)


def _said(backend: Any) -> dict[str, str]:
    return {"why": backend.why} if getattr(backend, "why", "") else {}


class _Static(DecodeBackend):
    """The step that a graph is captured of, uncaptured."""

    name, why = "static", ""

    def __init__(self, decoder: Decoder, cache: Any) -> None:
        self._cache, self._step = cache, StaticStep(decoder, cache)

    def step(self, token: int) -> torch.Tensor:
        self._step.give(token)
        logits = self._step.run()
        self._cache.set_length(self._cache.buffers[0].length + 1)
        return logits
