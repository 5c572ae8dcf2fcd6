"""A step in machine code: the whole token in one call, on the threads that torch computes with."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtool.core.model.stepping.family import Family, Unfit, family_of
from kvtool.core.model.stepping.ir_play import module
from kvtool.core.model.stepping.layout import Buffers, code_of, lay_out
from kvtool.core.model.stepping.plain import TorchStepper
from kvtool.core.model.stepping.tape import BLOCK, CONTEXT, HEADROOM, encode, word
from kvtool.core.model.stepping.threads import openmp
from kvtool.core.native.compiling import ISAS, compiled, runnable

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache

_CACHES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POSITIONS = 64  # whose cos and sin are computed together
_MOST_NUMBERS = 1024  # of one head's keys in registers and scratch memory: head_dim, or the heads that share a key


class Engine:
    """A model's tape and code, and the cache that it stands on just now.

    Parameters
    ----------
    isa : one of `runnable()`.

    Raises
    ------
    Unfit : the model computes something that a tape does not have.
    """

    def __init__(self, decoder: Decoder, isa: str) -> None:
        self.isa = isa
        self.lock = threading.Lock()
        self.trusted: bool | None = None
        self._family = family_of(decoder)
        _check_sizes(self._family)
        self._most_threads = max(torch.get_num_threads(), os.cpu_count() or 1)
        self._buffers = Buffers(self._family, self._most_threads)
        code = code_of(self._family, _CACHES[decoder.dtype])
        addresses = compiled(module(ISAS[isa], code), ISAS[isa], *code.names)
        codes = dict(zip(code.names, addresses, strict=True))
        self._team, self._nothing = codes["team"], codes["nothing"]
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(codes["alone"])
        operations = lay_out(self._family, self._buffers)
        self._tape = encode(operations, codes)
        self._uses = {kind: [i for i, one in enumerate(operations) if one.kind == kind] for kind in _BOUND}
        self._context = np.zeros(len(CONTEXT), np.int64)
        self._parts = torch.empty(0)
        self._tables: dict[int, torch.Tensor] = {}
        self._set("operations", self._tape.ctypes.data)
        self._set("count", len(self._tape))

    def step(self, decoder: Decoder, token: int, cache: PromptCache) -> torch.Tensor:
        """Append one token; its logits, float32 `[vocabulary]`."""
        length = cache.buffers[0].length + 1
        cache.set_length(length)
        self._bind(cache)
        self._place(decoder, length - 1)
        hidden, logits = self._buffers.tensors[:2]
        embedded = decoder.base.embed_tokens(torch.tensor([token]))[0]
        torch.mul(embedded, self._family.embedding, out=hidden) if embedded.dtype == hidden.dtype else hidden.copy_(
            embedded.float() * self._family.embedding
        )
        self._set("length", length)
        self._play()
        return logits.clone()

    def _bind(self, cache: PromptCache) -> None:
        """Write where keys and values lie, and where attention has room for its sums."""
        capacity = cache.buffers[0].keys.shape[2]
        blocks = -(-capacity // BLOCK)
        size = self._family.heads * blocks * (HEADROOM + self._family.head_dim)
        if self._parts.numel() < size:
            self._parts = torch.empty(size)
        keys = [buffer.keys.data_ptr() for buffer in cache.buffers]
        values = [buffer.values.data_ptr() for buffer in cache.buffers]
        for kind in ("keys", "attend"):
            self._write(kind, "key_cache", keys)
            self._write(kind, "value_cache", values)
            self._write(kind, "capacity", capacity)
        for kind in ("attend", "combine"):
            self._write(kind, "parts", self._parts.data_ptr())
            self._write(kind, "blocks", blocks)

    def _write(self, kind: str, field: str, value: int | list[int]) -> None:
        self._tape[self._uses[kind], word(kind, field)] = value

    def _place(self, decoder: Decoder, position: int) -> None:
        """Write where cos and sin of a position are."""
        start = position // _POSITIONS * _POSITIONS
        if start not in self._tables:
            table = decoder.rotary.table(torch.arange(start, start + _POSITIONS))
            self._tables = {start: torch.stack([table.cos[0], table.sin[0]]).contiguous()}
        cos, sin = self._tables[start][:, position - start]
        self._set("cos", cos.data_ptr())
        self._set("sin", sin.data_ptr())

    def _set(self, field: str, value: int) -> None:
        self._context[list(CONTEXT).index(field)] = value

    def _play(self) -> None:
        threads = min(torch.get_num_threads(), self._most_threads)
        team = openmp() if threads > 1 else None
        if team is None:
            self._set("barrier", self._nothing)
            self._alone(self._context.ctypes.data)
            return
        self._set("barrier", team.barrier)
        self._set("number", team.number)
        self._set("threads", team.threads)
        team.parallel(self._team, self._context.ctypes.data, threads, 0)


_BOUND = ("keys", "attend", "combine")


def _check_sizes(family: Family) -> None:
    """Refuse what the code's fixed memory is not made for."""
    group = family.heads // family.kv_heads
    if family.heads != group * family.kv_heads or group * family.head_dim > 16 * _MOST_NUMBERS:
        raise Unfit(f"{family.heads} heads over {family.kv_heads} of {family.head_dim} numbers")


class NativeStepper:
    """Steps in machine code over one cache."""

    name = "native"

    def __init__(self, decoder: Decoder, engine: Engine, cache: PromptCache) -> None:
        self._decoder, self._engine, self._cache = decoder, engine, cache

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        """Append one token; float32 `[vocabulary]`."""
        with self._engine.lock:
            return self._engine.step(self._decoder, token, self._cache)


__all__ = ["Engine", "NativeStepper", "TorchStepper", "runnable"]
