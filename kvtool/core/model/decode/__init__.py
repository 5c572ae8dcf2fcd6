"""Autoregressive decoding, a token at a time: the fastest backend that serves a model here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from kvtool.core.model.decode.cuda_graph import CudaGraphBackend
from kvtool.core.model.decode.native import MOST_TOGETHER, NativeBackend, compiled_model
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache


class DecodeBackend(Protocol):
    """Appends tokens to one prompt cache, which other code may read or extend between steps. `name`: "native", "cuda
    graph" or "torch"; `why` it is not the fastest backend."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    def step(self, token: int) -> torch.Tensor:
        """Append one token; return the logits after it, float32 `[vocabulary]`, which the next step may overwrite."""


class TorchBackend:
    """Steps by the model's own forward: any family, any device; `why` another backend does not serve."""

    name = "torch"

    def __init__(self, decoder: Decoder, cache: PromptCache, why: str = "") -> None:
        self._decoder = decoder
        self._cache = cache
        self.why = why

    def step(self, token: int) -> torch.Tensor:
        return self._decoder.extend([token], self._cache)[-1]


def decode_backend(decoder: Decoder, cache: PromptCache) -> DecodeBackend:
    if cache.dropped and any(kind.window for kind in decoder.kinds):
        return TorchBackend(decoder, cache, "windows over rows that are not at their places")
    if decoder.keeps_states:
        return TorchBackend(decoder, cache, "the model keeps states")
    if decoder.device.startswith("cuda"):
        return CudaGraphBackend(decoder, cache)
    compiled = compiled_model(decoder)
    if isinstance(compiled, str):
        return TorchBackend(decoder, cache, compiled)
    return NativeBackend(decoder, compiled, cache)


def step_together(backends: Sequence[DecodeBackend], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Append a token to each of several caches; return the logits after each as `step` does. Caches of one model in
    machine code run together, with the same bits as alone."""
    logits_by_place: dict[int, torch.Tensor] = {}
    for group in _groups(backends):
        logits = NativeBackend.step_together([*group.values()], [tokens[at] for at in group])
        logits_by_place |= dict(zip(group, logits, strict=True))
    return [
        logits_by_place[at] if at in logits_by_place else backend.step(tokens[at])
        for at, backend in enumerate(backends)
    ]


def step_along(backend: DecodeBackend, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
    """Append known tokens to one cache; yield the logits after each, the same bits as from single steps. The cache may
    be ahead of what was yielded: a caller that ends earlier shortens it."""
    done = 0
    while done < len(tokens):
        part = tokens[done : done + (MOST_TOGETHER if _is_trusted(backend) else 1)]
        yield from step_together([backend] * len(part), part)
        done += len(part)


def _is_trusted(backend: DecodeBackend) -> bool:
    return isinstance(backend, NativeBackend) and backend.compiled.self_check_error == ""


def _groups(backends: Sequence[DecodeBackend]) -> list[dict[int, NativeBackend]]:
    """Group those that can run together, by their places; a single one, or one not trusted yet, is in no group."""
    by_model: dict[int, dict[int, NativeBackend]] = {}
    for at, backend in enumerate(backends):
        if isinstance(backend, NativeBackend) and _is_trusted(backend):
            by_model.setdefault(id(backend.compiled), {})[at] = backend
    return [group for group in by_model.values() if len(group) > 1]
