"""Tensor-parallel ranks of vLLM: the first one leads, the others compute their shares of its modules.

Only the first rank reads records, chooses rows and attends to them, for all heads. So ranks cannot disagree about what
is damaged, slow or important, and the gate and all modes are what they are on one rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

_PATIENCE = timedelta(seconds=30)  # for the other ranks' same error


class Ranks:
    """Calls of vLLM's modules in which each rank of a tensor-parallel group takes part; without a group, one rank."""

    def __init__(self, model: Any, group: Any = None) -> None:
        self._model, self._group = model, group
        self.count: int = group.world_size if group else 1
        self.number: int = group.rank_in_group if group else 0

    # ---- who does what ----

    def lead(self, work: Callable[[], None]) -> None:
        """Do work in the first rank, in which it may `call`; the others take part until it is done."""
        if self.number > 0:
            self._follow()
            return
        work()
        if self.count > 1:
            self._group.broadcast_tensor_dict({"name": ""})

    @torch.inference_mode()
    def _follow(self) -> None:
        while name := (given := self._group.broadcast_tensor_dict()).pop("name"):
            with contextlib.suppress(Exception):  # the first rank reports it
                self._run(name, *given.values())

    def call(self, name: str, *given: Any) -> Any:
        """Call one of the methods below on every rank; return the first one's result."""
        if self.count > 1:
            sent = {"name": name, **{str(number): one for number, one in enumerate(given)}}
            contiguous = {k: one.contiguous() if isinstance(one, torch.Tensor) else one for k, one in sent.items()}
            self._group.broadcast_tensor_dict(contiguous)
        return self._run(name, *given)

    def _run(self, name: str, *given: Any) -> Any:
        try:
            return getattr(self, name)(*given)
        except Exception as error:
            if self.count > 1:
                self._check_others_failed(error)
            raise

    def _check_others_failed(self, error: Exception) -> None:
        """End this process, and so vLLM, where only this rank has failed: the others may wait for it for ever."""
        try:
            torch.distributed.all_reduce(torch.zeros(1), group=self._group.cpu_group, async_op=True).wait(_PATIENCE)
        except RuntimeError:
            os.write(2, f"kvtool: rank {self.number} alone has failed: {error!r}\n".encode())
            os._exit(1)  # an orderly exit waits for the other ranks, too

    # ---- what each rank does ----

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._model.model.embed_input_ids(ids)
        return out

    def project(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries and keys, both rotated, and values `[1, heads, rows, head_dim]` of states `[rows, width]`."""
        own = self._model.model.layers[layer].self_attn
        rows, counts = len(hidden), [own.num_heads, own.num_kv_heads, own.num_kv_heads]
        query, key, value = own.qkv_proj(hidden)[0].split([heads * own.head_dim for heads in counts], -1)
        if hasattr(own, "q_norm"):
            sides = ((own.q_norm, query), (own.k_norm, key))
            query, key = (norm(side.reshape(rows, -1, own.head_dim)) for norm, side in sides)
        # vLLM's kernels rotate in place, rows of one piece.
        query, key = own.rotary_emb(positions, *(side.reshape(rows, -1).contiguous() for side in (query, key)))
        heads = torch.cat([side.reshape(rows, -1, own.head_dim) for side in (query, key, value)], 1)
        parts = self._gathered(heads.transpose(0, 1).contiguous()).split(counts, 1)
        query, key, value = (part.flatten(0, 1)[None] for part in parts)
        copies = self._copies(own)
        return query, key[:, ::copies], value[:, ::copies]

    def output(self, layer: int, seen: torch.Tensor) -> torch.Tensor:
        own = self._model.model.layers[layer].self_attn
        first = self.number * own.num_heads
        out: torch.Tensor = own.o_proj(seen[:, first : first + own.num_heads].reshape(len(seen), -1))[0]
        return out

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._model.model.layers[layer].mlp(hidden)
        return out

    def logits(self, hidden: torch.Tensor) -> Any:
        return self._model.compute_logits(hidden)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows `[rows, kv_heads, head_dim]` to slots of the paged cache."""
        module = self._model.model.layers[layer].self_attn.attn
        keys, values = self._own_heads(layer, keys, values)
        write_rows(module, module.kv_cache, keys, values, slots)

    def differ(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor
    ) -> list[float]:
        """Return RMS differences of keys, and values, as shares of what is written, of every rank."""
        module = self._model.model.layers[layer].self_attn.attn
        keys, values = self._own_heads(layer, keys, values)
        theirs = module.kv_cache[blocks]
        ours = theirs.clone()
        write_rows(module, ours, keys, values, places)
        found = []
        for key, value in ((1, 0), (0, 1)):  # apart: keys may be many times as large as values
            written = torch.zeros_like(theirs)
            write_rows(module, written, torch.full_like(keys, key), torch.full_like(values, value), places)
            some = written != 0  # in whatever layout the backend keeps
            reference, other = theirs[some].double(), ours[some].double()
            found.append((reference - other).square().mean().sqrt() / reference.square().mean().sqrt())
        return self._gathered(torch.stack(found).float()).flatten().tolist()

    # ---- heads ----

    def kv_heads(self, own: Any) -> int:
        return int(own.num_kv_heads) * self.count // self._copies(own)

    def _copies(self, own: Any) -> int:
        return int(getattr(own.qkv_proj, "num_kv_head_replicas", 1))

    def _own_heads(self, layer: int, *sides: torch.Tensor) -> list[torch.Tensor]:
        own = self._model.model.layers[layer].self_attn
        first = self.number * own.num_kv_heads // self._copies(own)
        return [side[:, first : first + own.num_kv_heads].contiguous() for side in sides]

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the ranks' parts `[ranks, …]`."""
        whole = self._group.all_gather(part, 0) if self.count > 1 else part
        return whole.view(self.count, *part.shape)


def write_rows(module: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    module.impl.do_kv_cache_update(module, keys, values, cache, slots)
