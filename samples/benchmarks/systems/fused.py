"""kvtool itself, one fusion mode over the prepared store."""

from __future__ import annotations

from pathlib import Path

import torch

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.source import StoreSource
from kvtool.core.model.decode import DecodeBackend, decode_backend
from kvtool.core.model.decoder import Decoder
from kvtool.core.query.options import QueryOptions
from kvtool.core.session.identity import ProfileCache
from samples.benchmarks.bench.machine import Architecture, flops, fused_work, windows_of
from samples.benchmarks.bench.prompts import BenchPrompt, Stored
from samples.benchmarks.systems.plain import built
from samples.benchmarks.systems.prepare import STORE
from samples.benchmarks.systems.task import About, PeerPrompt, Task


class FusedRunner:
    """A session's parts without its store's own model: the store was made a moment ago, of the same one."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        files = resolve(task.model, offline=task.offline)
        self._decoder = Decoder(load_model(files, device="cpu", dtype=task.dtype, packed=True))
        self._store = Store.open(Path(task.folder) / STORE)
        self._profiles = ProfileCache(self._store)
        options = QueryOptions(
            fusion=task.contender.mode, ratio=task.ratio, link_tokens=task.link_tokens, link=task.link
        )
        self._selector = selector_for(options, task.contender.mode)
        self._room = task.new_tokens
        self._fused: Fused | None = None
        self._stepper: DecodeBackend | None = None

    def first(self, prompt: PeerPrompt) -> int:
        self._fused = self._stepper = None
        prefix, *chunks = (Stored(bytes.fromhex(piece.chunk_id), piece.ids, piece.level) for piece in prompt.pieces)
        source = StoreSource(self._store, self._decoder, self._profiles)
        with self._store.view():  # as a question has one
            laid_out = BenchPrompt(0, prefix, tuple(chunks), prompt.question).plan(self._store)
            self._fused = fuse(self._decoder, laid_out, self._selector, source, self._room)
        return int(self._fused.logits.argmax())

    def next(self, token: int) -> int:
        assert self._fused is not None
        if self._stepper is None:
            self._stepper = decode_backend(self._decoder, self._fused.cache)
        return int(self._stepper.step(token).argmax())

    def about(self, prompt: PeerPrompt) -> About:
        assert self._fused is not None
        assert self._stepper is not None
        work = flops(Architecture.of(self._decoder), fused_work(self._fused, self._selector, windows_of(self._decoder)))
        why = f" ({self._stepper.why})" if self._stepper.why else ""
        build = f"{built()}, decoding: {self._stepper.name}{why}"
        return About(kvtool.__version__, build, bytes_read=self._fused.bytes_read, flops=work)


def load(task: Task, capacity: int) -> FusedRunner:
    """Load the model and open the store."""
    return FusedRunner(task)
