"""A step in machine code: the whole token in one call, on the threads that torch computes with."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtool.core.model.quantised.matrix import Matrix
from kvtool.core.model.stepping.family import Family, family_of
from kvtool.core.model.stepping.ir_play import Code, module
from kvtool.core.model.stepping.kept import Unfit
from kvtool.core.model.stepping.layout import Buffers, code_of, lay_out
from kvtool.core.model.stepping.plain import TorchStepper
from kvtool.core.model.stepping.tape import BLOCK, CONTEXT, HEADROOM, encode, word
from kvtool.core.native.compiling import ISAS, compiled
from kvtool.core.native.team import openmp

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache

_CACHES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# What a bench tells apart.
PARTS = {
    "products": ("product",),
    "attention": ("queries", "keys", "attend", "combine"),
    "rest": ("norm", "blend", "gate"),
}
_POSITIONS = 64  # whose cos and sin are computed together
_MOST_SCORES = 2**13  # numbers of the queries that share a head of keys: what the code keeps at a time
# How far the first step may be from the model's own: root mean square difference, by that of the logits. Measured over
# all families and SmolLM2: 5e-6 and .08 at most; 1 and more where something is computed otherwise.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3}


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
        self.verdict: str | None = None  # None: not compared yet; empty: as the model's own
        self._family = family_of(decoder)
        _check_sizes(self._family)
        self._windows = [kind.window for kind in decoder.kinds]
        self._most_threads = max(torch.get_num_threads(), os.cpu_count() or 1)
        self._buffers = Buffers(self._family, self._most_threads)
        codes = _compiled(isa, code_of(self._family, _CACHES[decoder.dtype]))
        self._team, self._nothing = codes["team"], codes["nothing"]
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(codes["alone"])
        operations = lay_out(self._family, self._buffers)
        self._tape = encode(operations, codes)
        kinds = sorted({one.kind for one in operations})
        self._uses = {kind: [i for i, one in enumerate(operations) if one.kind == kind] for kind in kinds}
        self._context = np.zeros(len(CONTEXT), np.int64)
        self._parts = torch.empty(0, dtype=torch.float32)
        self._tables: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, decoder: Decoder, token: int, cache: PromptCache) -> torch.Tensor:
        """Append one token; its logits, float32 `[vocabulary]`."""
        embedded = decoder.base.embed_tokens(torch.tensor([token]))[0]
        length = cache.buffers[0].length + 1
        cache.set_length(length)
        self._bind(cache, length)
        self._place(decoder, length - 1 + cache.dropped)
        hidden, logits = self._buffers.tensors[:2]
        hidden.copy_(embedded).mul_(self._family.embedding)
        self._set("length", length)
        self.play()
        return logits.clone()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the model's matrices, by their layouts."""
        return tuple(sorted({matrix.kind for matrix in self._matrices}))

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return sum(matrix.nbytes for matrix in self._matrices)

    @property
    def _matrices(self) -> list[Matrix]:
        linears = [self._family.head, *(linear for layer in self._family.layers for linear in layer.linears)]
        return list({id(linear.matrix): linear.matrix for linear in linears}.values())

    def _bind(self, cache: PromptCache, length: int) -> None:
        """Write where keys and values lie and which of them are seen, and where attention has room for its sums."""
        capacity = cache.buffers[0].keys.shape[2]
        blocks = -(-capacity // BLOCK)
        size = self._family.heads * blocks * (HEADROOM + self._family.head_dim)
        if self._parts.numel() < size:
            self._parts = torch.empty(size, dtype=torch.float32)
        keys = [buffer.keys.data_ptr() for buffer in cache.buffers]
        values = [buffer.values.data_ptr() for buffer in cache.buffers]
        seen = [min(length, window or length) for window in self._windows]
        row = self._family.head_dim * cache.buffers[0].keys.itemsize  # a window begins so many rows further on
        for kind, before in (("keys", [0] * len(seen)), ("attend", [(length - count) * row for count in seen])):
            self._write(kind, "key_cache", [place + more for place, more in zip(keys, before, strict=True)])
            self._write(kind, "value_cache", [place + more for place, more in zip(values, before, strict=True)])
            self._write(kind, "capacity", capacity)
        for kind in ("attend", "combine"):
            self._write(kind, "seen", seen)
            self._write(kind, "parts", self._parts.data_ptr())
            self._write(kind, "blocks", blocks)

    def _write(self, kind: str, field: str, value: int | list[int]) -> None:
        self._tape[self._uses[kind], word(kind, field)] = value

    def _place(self, decoder: Decoder, position: int) -> None:
        """Write where cos and sin of a position are."""
        start = position // _POSITIONS * _POSITIONS
        if start not in self._tables:
            table = decoder.rotary.table(torch.arange(start, start + _POSITIONS)).by_name
            stacked = {name: torch.stack([one.cos[0], one.sin[0]]).contiguous() for name, one in table.items()}
            self._tables = {start: stacked}
        angles = self._tables[start]
        for place, side in enumerate(("cos", "sin")):
            at = {name: both[place, position - start].data_ptr() for name, both in angles.items()}
            each = [0 if kind.rotation is None else at[kind.rotation] for kind in decoder.kinds]
            for operation in ("queries", "keys"):
                self._write(operation, side, each)

    def _set(self, field: str, value: int) -> None:
        self._context[list(CONTEXT).index(field)] = value

    def play(self, kinds: Collection[str] | None = None) -> None:
        """Play the tape as it stands, or the operations of some kinds alone, whose sums then mean nothing."""
        tape = self._tape
        if kinds is not None:
            tape = tape[sorted(place for kind in kinds for place in self._uses[kind])]
        self._set("operations", tape.ctypes.data)
        self._set("count", len(tape))
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


@cache
def _compiled(isa: str, code: Code) -> dict[str, int]:
    """The address of every function, by name; models that differ in sizes only share them."""
    addresses = compiled(module(ISAS[isa], code), ISAS[isa], *code.names)
    return dict(zip(code.names, addresses, strict=True))


def _check_sizes(family: Family) -> None:
    """Refuse what the code's fixed memory is not made for."""
    group = family.heads // family.kv_heads
    if family.heads != group * family.kv_heads or group * family.head_dim > _MOST_SCORES:
        raise Unfit(f"{family.heads} heads over {family.kv_heads} of {family.head_dim} numbers")


class NativeStepper:
    """Steps in machine code over one cache; by the model's own forward if the first step came out otherwise."""

    def __init__(self, decoder: Decoder, engine: Engine, cache: PromptCache) -> None:
        self._decoder, self._engine, self._cache = decoder, engine, cache
        self._torch = TorchStepper(decoder, cache)

    @property
    def name(self) -> str:
        """ "native", or "torch" after a first step that came out otherwise."""
        return "torch" if self._engine.verdict else "native"

    @property
    def why(self) -> str:
        """The reason, where it is "torch"."""
        return self._engine.verdict or ""

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        """Append one token; float32 `[vocabulary]`."""
        with self._engine.lock:
            if self._engine.verdict is None:
                return self._compared(token)
            if self._engine.verdict:
                return self._torch.step(token)
            return self._engine.step(self._decoder, token, self._cache)

    def _compared(self, token: int) -> torch.Tensor:
        """The process's first step with a model: both ways, of which the model's own is right."""
        start = self._cache.buffers[0].length
        expected = self._torch.step(token)
        self._cache.set_length(start)
        found = self._engine.step(self._decoder, token, self._cache)
        apart = float((found - expected).square().mean().sqrt() / expected.std())
        if apart <= _ROUNDING[self._decoder.dtype]:
            self._engine.verdict = ""
            return found
        self._engine.verdict = (
            f"the first step in machine code came out otherwise, by {apart:.2g} of the logits' spread"
        )
        self._cache.set_length(start)
        return self._torch.step(token)
