"""Saving of what vLLM computes: chunks' keys and values are read from its paged cache, for `kvtool ingest --engine`.

A request that asks for it is never fed. Its rows are read after the step that computes its prompt's last token: then
all of them are in its blocks, whether they were computed in pieces, again after a preemption, or found in vLLM's prefix
cache, where only exact blocks have names without a salt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtool.core.common.machine import Arithmetic
from kvtool.core.common.types import Ids, Warn
from kvtool.core.errors import ModelError
from kvtool.core.model.prefill import ChunkKV, LeadIn
from kvtool.core.records.encode import check_float16_range, sensitivities
from kvtool.core.records.spool import Computed, SaveWish, Spool
from kvtool.vllm.ranks import write_rows
from kvtool.vllm.worker import Feeder

_DIGIT, _DIGITS = 128, 4  # of a place's number: small integers are exact in every format


@dataclass(frozen=True, slots=True)
class Save:
    ids: Ids
    wish: SaveWish
    blocks: tuple[int, ...]


class SaveQueue:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._wanted: dict[str, tuple[Ids, SaveWish]] = {}

    def takes(self, request: Any, wish: object) -> bool:
        if (found := SaveWish.of(wish)) is not None:
            self._wanted[request.request_id] = tuple(request.prompt_token_ids or ()), found
        return found is not None

    def forget(self, request_id: str) -> None:
        self._wanted.pop(request_id, None)

    def due(self, step: Any, blocks_of: Callable[[str], Sequence[int]]) -> list[Save]:
        """Return the requests whose last prompt token is computed in a step, vLLM's `SchedulerOutput`."""
        if not self._wanted:
            return []
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        found = []
        for name in self._wanted.keys() & computed.keys():
            ids, wish = self._wanted[name]
            if computed[name] + step.num_scheduled_tokens[name] >= len(ids):
                found.append(Save(ids, wish, tuple(blocks_of(name))[: -(-len(ids) // self._block_size)]))
                self.forget(name)
        return found


class Saver:
    """Saves rows of vLLM's paged cache, in the worker."""

    def __init__(self, store: Path, feeder: Feeder, block_size: int, warn: Warn) -> None:
        self._store, self._feeder, self._block_size, self._warn = store, feeder, block_size, warn
        self._layouts: dict[tuple[int, int], torch.Tensor] = {}
        self._other: LeadIn | None = None

    def save(self, wanted: Save) -> None:
        """Write a chunk to its spool, or why that is not possible; nothing where nobody waits for it."""
        spool, ids = Spool(self._store, wanted.wish.save), wanted.ids[wanted.wish.after :]
        if not os.path.isdir(spool.folder):  # which, other than Path's, raises nothing
            self._warn("a chunk was to be saved for no running ingest into the connector's store", "")
            return
        ranks = self._feeder.ranks
        if ranks.number > 0:  # the first rank reports for all
            return
        try:
            if ranks.count > 1:
                raise ModelError("vLLM runs on several tensor-parallel ranks, each with a part of the heads", "")
            spool.put(ids, self._read(wanted))
        except Exception as error:  # vLLM's engine must not end with it
            self._warn(f"a chunk is not saved: {error!r}", "")
            with suppress(OSError):  # the ingest has ended
                spool.put_error(ids, str(error))

    @torch.inference_mode()
    def _read(self, wanted: Save) -> Computed:
        decoder: Any = self._feeder.session.decoder
        first = wanted.wish.after // self._block_size  # the blocks before hold none of its rows
        if 0 in wanted.blocks[first:]:  # vLLM's null block
            raise ModelError("the chunk is longer than the model's window", "use fewer --chunk-tokens")
        blocks = torch.tensor(wanted.blocks[first:], device=decoder.device)
        places = torch.arange(wanted.wish.after, len(wanted.ids), device=decoder.device)
        rows, undo = places - first * self._block_size, decoder.rotary.table(places).inverse()
        layers = []
        for number, (layer, shape) in enumerate(zip(decoder.layers, decoder.shapes, strict=True)):
            module = layer.self_attn.attn
            where = self._layout(module, shape.heads, shape.key_dim)
            numbers = module.kv_cache[blocks].flatten(1)[:, where].view(-1, 2, shape.heads, shape.key_dim)
            keys, values = numbers[rows].permute(1, 2, 0, 3)
            keys = decoder.rotary.rotate(keys[None].float(), undo, number)[0]  # rounded once, to the store's format
            layers.append([side.to("cpu", decoder.kv_dtype).contiguous() for side in (keys, values)])
        check_float16_range(side for sides in layers for side in sides)
        kv, other = ChunkKV(*zip(*layers, strict=True)), wanted.wish.other
        made = Arithmetic(decoder.loaded.arithmetic.dtype, "vllm")
        if other is None:
            return kv, b"", made
        if self._other is None or self._other.ids != tuple(other):
            self._other = LeadIn(decoder, other)
        return kv, sensitivities(decoder, self._other, [wanted.ids[wanted.wish.after :]], [kv])[0], made

    def _layout(self, module: Any, heads: int, head_dim: int) -> torch.Tensor:
        """Return where a block has the numbers of its tokens, in the order `[tokens, 2, heads, head_dim]`.

        A backend has a public way of writing, and none of reading: numbered keys and values are written to an empty
        block, digit by digit.
        """
        cache = module.kv_cache
        if (heads, head_dim) not in self._layouts:
            slots = torch.arange(self._block_size, device=cache.device)
            numbers = 1 + torch.arange(self._block_size * 2 * heads * head_dim, device=cache.device)
            found = torch.zeros_like(cache[:1], dtype=torch.int64)
            for scale in (_DIGIT**digit for digit in range(_DIGITS)):
                digits = (numbers // scale % _DIGIT).to(cache.dtype).view(len(slots), 2, heads, head_dim)
                block = torch.zeros_like(cache[:1])
                write_rows(module, block, digits[:, 0].contiguous(), digits[:, 1].contiguous(), slots)
                found += block.long() * scale
            places = found.flatten().nonzero()[:, 0]
            order = found.flatten()[places].argsort()
            if not torch.equal(found.flatten()[places[order]], numbers):
                raise ModelError(f"{type(module.impl).__name__} of vLLM keeps its cache in a way that is not known", "")
            self._layouts[heads, head_dim] = places[order]
        return self._layouts[heads, head_dim]
