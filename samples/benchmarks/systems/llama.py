"""llama.cpp through the C interface that llama-cpp-python binds: what `llama-cli` itself calls. No torch."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from kvtool.core.common.types import Ids
from kvtool.core.errors import KvtoolError, ModelError
from samples.benchmarks.systems.task import AUTO, OFF, ON, About, PeerPrompt, Saved, Task, hold_to, read_prompt

_FLASH = {
    AUTO: llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    ON: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    OFF: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_BATCH = 2048  # tokens given at once, llama.cpp's default
_SEQUENCE = 0
UBATCHES = (128, 512, 1024)  # tried
_TRIALS = 2


# llama.cpp writes to stderr what it does; a reference to this must be kept.
_silent = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Llama:
    """A model with one context, whose keys and values are float16, llama.cpp's default."""

    def __init__(self, gguf: str, threads: int, capacity: int) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(gguf.encode(), parameters)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {gguf}", "take another --model, or --peers transformers")
        self._threads, self._capacity = threads, capacity
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None

    def open(self, ubatch: int, flash: str) -> None:
        """Make the context anew."""
        if self._context:
            llama_cpp.llama_free(self._context)
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = self._capacity, max(_BATCH, ubatch), ubatch
        wanted.n_threads = wanted.n_threads_batch = self._threads
        wanted.flash_attn_type = _FLASH[flash]
        self._context = llama_cpp.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise KvtoolError(f"llama.cpp has no room for {self._capacity} tokens", "take a shorter --context")

    def first(self, prompt: PeerPrompt) -> int:
        self.keep(0)
        return self.compute(prompt.ids)

    def next(self, token: int) -> int:
        return self.compute((token,))

    def compute(self, ids: Sequence[int]) -> int:
        """Append tokens; return the likeliest next one."""
        numbers = np.array(ids, np.int32)
        for start in range(0, len(numbers), _BATCH):
            part = np.ascontiguousarray(numbers[start : start + _BATCH])
            pointer = part.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
            if code := llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(pointer, len(part))):
                raise KvtoolError(f"llama.cpp failed to compute {len(part)} tokens (code {code})")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def keep(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, _SEQUENCE, tokens, -1)

    def saved(self, prompt: PeerPrompt, path: Path) -> Saved:
        """Save the state after the documents, which the context holds; load it and answer the question."""
        documents = np.array(prompt.documents, np.int32)
        pointer = documents.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
        self.keep(len(documents))
        name = str(path).encode()
        started = time.perf_counter()
        size = llama_cpp.llama_state_seq_save_file(self._context, name, _SEQUENCE, pointer, len(documents))
        save_ms = (time.perf_counter() - started) * 1e3
        self.keep(0)
        started = time.perf_counter()
        self._load(name, len(documents))
        self.compute(prompt.question)
        return Saved(size, len(documents), save_ms, (time.perf_counter() - started) * 1e3)

    def _load(self, name: bytes, count: int) -> None:
        ids, found = (llama_cpp.llama_token * count)(), ctypes.c_size_t(0)
        if not llama_cpp.llama_state_seq_load_file(
            self._context, name, _SEQUENCE, ids, ctypes.c_size_t(count), ctypes.byref(found)
        ):
            raise KvtoolError("llama.cpp cannot load the state that it saved")


class LlamaRunner(Llama):
    """A contender: settings of llama.cpp."""

    def __init__(self, task: Task, capacity: int) -> None:
        assert task.gguf is not None
        super().__init__(task.gguf, task.threads, capacity)
        self.open(task.contender.ubatch, task.contender.flash)
        self._folder = Path(task.folder)

    def about(self, prompt: PeerPrompt) -> About:
        state = self._folder / "llama-state.bin"
        try:
            return About(llama_cpp.__version__, build(), self.saved(prompt, state))
        finally:
            state.unlink(missing_ok=True)


def load(task: Task, capacity: int) -> LlamaRunner:
    """Load the model."""
    return LlamaRunner(task, capacity)


def build() -> str:
    """Return llama.cpp's own description of its build and CPU features."""
    return " ".join(llama_cpp.llama_print_system_info().decode("utf-8", "replace").split())


def tuned(task: Task) -> dict[str, Any]:
    """Try settings on the task's prompt, in turn; milliseconds of prefill, medians."""
    hold_to(task.threads)
    ids = read_prompt(task).ids
    assert task.gguf is not None
    model = Llama(task.gguf, task.threads, len(ids) + 1)
    times: dict[tuple[int, str], list[float]] = {}
    for _ in range(_TRIALS):
        for ubatch in UBATCHES:
            for flash in (ON, OFF):
                times.setdefault((ubatch, flash), []).append(_prefill(model, ids, ubatch, flash))
    rows = [{"ubatch": u, "flash": f, "prefill_ms": statistics.median(taken)} for (u, f), taken in times.items()]
    return {"context": task.context, "rows": rows}


def _prefill(model: Llama, ids: Ids, ubatch: int, flash: str) -> float:
    model.open(ubatch, flash)
    model.compute(ids[:32])
    model.keep(0)
    started = time.perf_counter()
    model.compute(ids)
    return (time.perf_counter() - started) * 1e3
