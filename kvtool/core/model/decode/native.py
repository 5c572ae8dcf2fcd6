"""Decoding on a CPU in machine code: a token of one sequence, or of each of several, in one call on torch's threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvtool.core.common.machine import STEPPER, asked
from kvtool.core.kernels import FORMATS
from kvtool.core.kernels.decode_ir import CONTEXT, INT8, Code, module, multiply_name, products
from kvtool.core.model.decode.program import CosSinCache, Step, code_of, decoding_weights
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.spec import UnsupportedArchitecture, check_trial
from kvtool.core.native.isa import AVX2, AVX512, NEON, SCALAR, Isa, best_isa
from kvtool.core.native.jit import Function, compiled
from kvtool.core.native.threads import Barrier, all_of, launch

_MOST_SCORES = 2**13  # numbers of the queries that share a head of keys: what the code keeps at a time
# Sequences that a row of weights is multiplied with at a time: their sums stay in registers. Measured, one core of an
# AMD EPYC, weights in its cache: 1.6 to 3 times as many products a second as with one; with more as many, or fewer.
_MOST_AT_ONCE = {AVX512: 4, AVX2: 3, NEON: 3, SCALAR: 3}
MOST_TOGETHER = 16  # sequences of a step; arithmetic is what takes time by then


class CompiledModel:
    """A model's code, with a program for each number of sequences. Raises UnsupportedArchitecture."""

    def __init__(self, decoder: Decoder, isa: Isa) -> None:
        self.isa = isa
        self.lock = threading.Lock()
        self.self_check_error: str | None = None  # None: not compared yet; "": as the model's own
        self._weights = decoding_weights(decoder)
        self._spec = decoder.spec
        group = self._spec.heads // self._spec.kv_heads
        if self._spec.heads != group * self._spec.kv_heads or group * self._spec.head_dim > _MOST_SCORES:
            heads = f"{self._spec.heads} heads over {self._spec.kv_heads} of {self._spec.head_dim} numbers"
            raise UnsupportedArchitecture(heads)
        self._windows = [kind.window for kind in decoder.kinds]
        self._most_threads = max(torch.get_num_threads(), os.cpu_count() or 1)
        codes = _compiled(isa, code_of(self._spec, self._weights, FORMATS[decoder.dtype]))
        self._codes = codes
        self._steps = {1: self._new_step(1)}
        self._angles = CosSinCache(decoder.rotary)
        self._barrier, self._taken = Barrier(), np.zeros(1, np.int64)

    def _new_step(self, sequences: int) -> Step:
        height, codes = _height(self.isa, sequences), dict(self._codes)
        if height > 1:
            codes |= {multiply_name(kind, height): _products(self.isa, kind, height) for kind in self.kinds}
        return Step(self._spec, self._weights, codes, height, self._most_threads, sequences)

    def step(self, decoder: Decoder, tokens: Sequence[int], caches: Sequence[PromptCache]) -> torch.Tensor:
        """Append a token to each of at most `MOST_TOGETHER` caches; return float32 `[caches, vocabulary]`. A cache that
        is given several times takes that many tokens, one after the other."""
        embedded = decoder.base.embed_tokens(torch.tensor(tokens))
        count = len(tokens)
        step = self._steps.get(count) or self._steps.setdefault(count, self._new_step(count))
        positions: list[int] = []
        lengths: list[int] = []
        for prompt in caches:
            positions.append(prompt.buffers[0].length + prompt.dropped)
            prompt.set_length(prompt.buffers[0].length + 1)
            lengths.append(prompt.buffers[0].length)
        step.bind(caches, lengths, self._windows)
        angles = [self._angles.at(position) for position in positions]
        step.place(angles, [kind.rotation for kind in decoder.kinds])
        step.buffers.embedded.copy_(embedded).mul_(self._spec.embedding)
        self._run(step.program)
        return step.buffers.found.clone()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({linear.product for linear in self._weights.values()}))

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """Return the format whose rounding a step's numbers may differ by. With 8-bit inputs that is bfloat16: a
        float32 that differs in its last bit may be rounded to the next integer."""
        return torch.bfloat16 if any(kind.endswith(INT8) for kind in self.kinds) else dtype

    @property
    def weights_bytes(self) -> int:
        return sum({id(linear.matrix): linear.matrix.nbytes for linear in self._weights.values()}.values())

    def _run(self, program: np.ndarray) -> None:
        with all_of(min(torch.get_num_threads(), self._most_threads)) as threads:
            self._taken[0] = 0
            values = {"operations": program.ctypes.data, "count": len(program), "threads": threads}
            job = CONTEXT.pack(**values, taken=self._taken.ctypes.data, barrier=self._barrier.address)
            launch(self._codes["run_program"], job, threads)


@cache
def _compiled(isa: Isa, code: Code) -> dict[str, Function]:
    addresses = compiled(module(isa, code), isa, *code.names)
    return dict(zip(code.names, addresses, strict=True))


@cache
def _products(isa: Isa, kind: str, height: int) -> Function:
    return compiled(products(isa, kind, height), isa, multiply_name(kind, height))[0]


def _height(isa: Isa, sequences: int) -> int:
    """Return how many sequences are multiplied at a time: all, or as evenly as registers allow."""
    most = _MOST_AT_ONCE[isa]
    return -(-sequences // -(-sequences // most))


class NativeBackend:
    """Steps in machine code over one cache; by the model's own forward if the first step differed."""

    def __init__(self, decoder: Decoder, model: CompiledModel, cache: PromptCache) -> None:
        self._decoder, self.compiled, self._cache = decoder, model, cache

    @property
    def name(self) -> str:
        return "torch" if self.compiled.self_check_error else "native"

    @property
    def why(self) -> str:
        return self.compiled.self_check_error or ""

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        with self.compiled.lock:
            if self.compiled.self_check_error is None:
                return self._compared(token)
            if self.compiled.self_check_error:
                return self._step_by_torch(token)
            return self.compiled.step(self._decoder, [token], [self._cache])[0]

    def _step_by_torch(self, token: int) -> torch.Tensor:
        return self._decoder.extend([token], self._cache)[-1]

    def _compared(self, token: int) -> torch.Tensor:
        start = self._cache.buffers[0].length
        expected = self._step_by_torch(token)
        self._cache.set_length(start)
        logits = self.compiled.step(self._decoder, [token], [self._cache])[0]
        try:
            check_trial(logits, expected, self.compiled.precision(self._decoder.dtype), len(self._decoder.layers))
        except UnsupportedArchitecture as error:
            self.compiled.self_check_error = f"the first step in machine code came out otherwise: {error}"
            self._cache.set_length(start)
            return self._step_by_torch(token)
        self.compiled.self_check_error = ""
        return logits

    @staticmethod
    @torch.inference_mode()
    def step_together(backends: Sequence[NativeBackend], tokens: Sequence[int]) -> list[torch.Tensor]:
        model, decoder = backends[0].compiled, backends[0]._decoder
        rounds = -(-len(tokens) // MOST_TOGETHER)
        logits: list[torch.Tensor] = []
        for number in range(rounds):  # as even as can be
            part = slice(len(tokens) * number // rounds, len(tokens) * (number + 1) // rounds)
            with model.lock:
                logits += model.step(decoder, tokens[part], [backend._cache for backend in backends[part]])
        return logits


_models: WeakKeyDictionary[Decoder, Future[CompiledModel | str]] = WeakKeyDictionary()
_lock = threading.Lock()


def prepare_compiled_model(decoder: Decoder) -> Future[CompiledModel | str]:
    """Start to compile a model's code in a thread: 0.1 s. It is not a daemon, since a process that ends must wait for
    LLVM."""
    with _lock:
        if (future := _models.get(decoder)) is None:
            executor = ThreadPoolExecutor(1, "kvtool-decode")
            future = _models[decoder] = executor.submit(_compile_model, decoder)
            executor.shutdown(wait=False)
    return future


def compiled_model(decoder: Decoder) -> CompiledModel | str:
    return prepare_compiled_model(decoder).result()


def _compile_model(decoder: Decoder) -> CompiledModel | str:
    if decoder.keeps_states:
        return "the model keeps states"
    if asked(STEPPER) == "torch":
        return f"{STEPPER} asks for it"
    try:
        return CompiledModel(decoder, best_isa())
    except UnsupportedArchitecture as error:
        return str(error)
