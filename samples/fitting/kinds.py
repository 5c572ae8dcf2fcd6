"""What can be fitted: adapters while chunks are compiled, adapters while a question is read, offsets, scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from fitting.prompts import Prompt, Rows
from fitting.reading import Reading, held, read
from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.modules import cache_name

Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

WRITTEN = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
READ = ("q_proj", "v_proj", "o_proj")


class Adapters:
    """Low-rank additions to the linear layers of a model, which take part only where they are asked to."""

    def __init__(self, decoder: Decoder, rank: int, names: tuple[str, ...]) -> None:
        self.parameters: list[torch.nn.Parameter] = []
        self._active = False
        for layer in decoder.layers:
            for name in names:
                host: Any = layer
                self._add(getattr(host.self_attn if hasattr(host.self_attn, name) else host.mlp, name), rank)

    @contextmanager
    def active(self, wanted: bool = True) -> Iterator[None]:
        self._active = wanted
        try:
            yield
        finally:
            self._active = False

    def _add(self, linear: Any, rank: int) -> None:
        down = torch.nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        up = torch.nn.Parameter(torch.zeros(linear.out_features, rank))
        self.parameters += [down, up]

        def added(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            rows = inputs[0]
            return output + (rows @ down.T.to(rows.dtype)) @ up.T.to(rows.dtype) if self._active else output

        linear.register_forward_hook(added)


class Writer:
    """Adapters while chunks are prefilled: what SemPIC (arXiv 2607.28069) trains, behind the store's lead-in."""

    runs = ("reuse",)

    def __init__(self, decoder: Decoder, rank: int, lead_in: Ids) -> None:
        self._decoder, self._lead_in = decoder, lead_in
        self._adapters = Adapters(decoder, rank, WRITTEN)
        self._before = _prefilled(decoder, [lead_in])
        self.parameters = self._adapters.parameters

    def read(self, prompt: Prompt, run: str, fitted: bool = True) -> Reading:
        with self._adapters.active(fitted):
            apart = self._compiled(prompt.chunks)
        return read(prompt, self._joined(prompt, apart))

    def _compiled(self, chunks: list[Ids]) -> Rows:
        """Keys (un-rotated) and values of all chunks `[chunks, kv_heads, longest, head_dim]`, each alone behind the
        lead-in."""
        rows = _prefilled(self._decoder, chunks, self._before)
        start, stop = len(self._lead_in), rows[0][0].shape[2]
        undo = self._decoder.rotary.table(torch.arange(start, stop)).inverse()
        turn = self._decoder.rotary.rotate
        return [(turn(k[:, :, start:].float(), undo, n), v[:, :, start:]) for n, (k, v) in enumerate(rows)]

    def _joined(self, prompt: Prompt, apart: Rows) -> Rows:
        decoder, start = self._decoder, len(prompt.prefix)
        parts = [[layer] for layer in _prefilled(decoder, [prompt.prefix])]
        for number, chunk in enumerate(prompt.chunks):
            table = decoder.rotary.table(torch.arange(start, start + len(chunk)))
            start += len(chunk)
            for layer, (keys, values) in enumerate(apart):
                own = (slice(number, number + 1), slice(None), slice(len(chunk)))
                parts[layer].append((decoder.rotary.rotate(keys[own], table, layer).to(decoder.dtype), values[own]))
        return [(torch.cat([keys for keys, _ in own], 2), torch.cat([values for _, values in own], 2)) for own in parts]


class Reader:
    """Adapters on the rows of question and answer: stored chunks stay what they were."""

    runs = ("reuse", "union:5%", "union:15%")

    def __init__(self, decoder: Decoder, rank: int, lead_in: Ids) -> None:
        self._adapters = Adapters(decoder, rank, READ)
        self.parameters = self._adapters.parameters

    def read(self, prompt: Prompt, run: str, fitted: bool = True) -> Reading:
        rows = prompt.rows(run)
        with self._adapters.active(fitted):
            return read(prompt, rows)


class Offset:
    """One offset of keys and of values for every layer and head, added to all rows of chunks when they are stored."""

    runs = ("reuse",)

    def __init__(self, decoder: Decoder, rank: int, lead_in: Ids) -> None:
        self._decoder = decoder
        self.parameters = _a_head(decoder, decoder.shapes[0].key_dim)

    def read(self, prompt: Prompt, run: str, fitted: bool = True) -> Reading:
        start, stop = len(prompt.prefix), prompt.length
        table = self._decoder.rotary.table(torch.arange(start, stop))

        def moved(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            by_keys, by_values = (side[layer].expand(1, -1, stop - start, -1) for side in self.parameters)
            by_keys = self._decoder.rotary.rotate(by_keys.contiguous(), table, layer)
            return keys + by_keys.to(keys.dtype), values + by_values.to(values.dtype)

        return read(prompt, _changed(prompt.rows(run), start, moved) if fitted else prompt.rows(run))


class Scale:
    """A factor of keys and of values for every layer and head, and one of the logits.

    APE (arXiv 2502.05431) has two factors in all.
    """

    runs = ("reuse",)

    def __init__(self, decoder: Decoder, rank: int, lead_in: Ids) -> None:
        self.parameters = [*_a_head(decoder, 1), torch.nn.Parameter(torch.zeros(()))]

    def read(self, prompt: Prompt, run: str, fitted: bool = True) -> Reading:
        def scaled(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            by_keys, by_values = (side[layer].exp() for side in self.parameters[:2])
            return keys * by_keys.to(keys.dtype), values * by_values.to(values.dtype)

        if not fitted:
            return read(prompt, prompt.rows(run))
        return read(prompt, _changed(prompt.rows(run), len(prompt.prefix), scaled), self.parameters[2].exp())


KINDS: dict[str, Any] = {"writer": Writer, "reader": Reader, "offset": Offset, "scale": Scale}


def _a_head(decoder: Decoder, numbers: int) -> list[torch.nn.Parameter]:
    """For keys and for values: zeros for every layer and head."""
    shape = (len(decoder.layers), decoder.shapes[0].heads, 1, numbers)
    return [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]


def _changed(rows: Rows, start: int, change: Change) -> Rows:
    """The rows with those from `start` on changed."""
    changed = []
    for layer, sides in enumerate(rows):
        later = change(layer, *(side[:, :, start:] for side in sides))
        keys, values = (torch.cat([side[:, :, :start], own], 2) for side, own in zip(sides, later, strict=True))
        changed.append((keys, values))
    return changed


def _prefilled(decoder: Decoder, texts: list[Ids], before: Rows | None = None) -> Rows:
    """The rows of texts `[texts, kv_heads, before + longest, head_dim]` behind others, padded on the right."""
    cache = held(before, len(texts)) if before else DynamicCache()
    start, longest = before[0][0].shape[2] if before else 0, max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    positions = torch.arange(start, start + longest).expand(len(texts), -1)
    with decoder.plain_attention():
        decoder.base(ids, position_ids=positions, use_cache=True, **{cache_name(decoder.base): cache})
    return [(layer.keys, layer.values) for layer in cache.layers]
