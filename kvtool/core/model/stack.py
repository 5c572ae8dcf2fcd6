"""Decoder stack: a loaded model's layers, with what each layer's attention is and how its keys are moved.

What differs between model families is read off the modules themselves. No model code is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.checkpoint.load import Loaded
from kvtool.core.checkpoint.support import ONLY_EXACTLY, context_limit, keeps_states
from kvtool.core.errors import DamagedError, ModelError, UsageError
from kvtool.core.kernels.attention import dispatch
from kvtool.core.model.hf.probing import probed
from kvtool.core.model.prompt_cache import BufferLayer, KVShape, PromptCache, outline_of
from kvtool.core.model.rope import Rotary, layout_of


class Turns:
    """A fair (first in, first out) lock, for one turn at a time: a thread that retakes a plain lock would keep it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[object] = deque()  # the first one has the turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        me = object()
        with self._changed:
            self._asked.append(me)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._asked[0] is me)
            yield
        finally:
            with self._changed:
                self._asked.remove(me)
                self._changed.notify_all()


class DecoderStack:
    """The decoder layers of a loaded model, whose attention is computed by kvtool from here on. If last layers attend
    to KV of earlier ones, `shapes` are of the latter."""

    _between: Callable[[], None] | None = None

    def __init__(self, loaded: Loaded, kv_dtype: torch.dtype | None = None) -> None:
        self.loaded = loaded
        self.turns = Turns()
        self.model: Any = loaded.model
        self.config = self.model.config
        self.keeps_states = keeps_states(self.config)
        self.dtype: torch.dtype = self.model.dtype
        self.kv_dtype: torch.dtype = kv_dtype or self.dtype  # stored; it differs where a CPU is slow in it
        self.device: str = loaded.device
        self.context = context_limit(self.config)  # the longest prompt, in tokens
        dispatch.prepare(self.dtype, self.device)
        outline = outline_of(self.model) if isinstance(self.model, DenseModel) else probed(loaded)
        self.base = outline.base
        self.layers: list[torch.nn.Module] = list(self.base.layers)
        self.kinds = outline.kinds
        self.shapes = tuple(kind.shape for kind in self.kinds if kind.source is None)
        self._attending = outline.attending
        self._rotary: Rotary | None = None
        layout = layout_of(self.config.model_type)
        with suppress(ModelError) if self.keeps_states else nullcontext():  # that one can do without
            self._rotary = Rotary(self.base, self.kinds, layout, outline.samples, self.dtype, self.device)

    @property
    def rotary(self) -> Rotary:
        if self._rotary is None:
            needed = "that would need keys that are rotated by nothing but their positions"
            raise ModelError(f"keys of the model cannot be moved to another place; {needed}", ONLY_EXACTLY)
        return self._rotary

    @contextmanager
    def pausing(self, work: Callable[[], None] | None) -> Iterator[None]:
        """Call `work` before each layer of all passes inside; its errors end the pass. It may run the model over other
        caches, and is not interrupted itself."""
        before, self._between = self._between, work
        try:
            yield
        finally:
            self._between = before

    def pause(self) -> None:
        """Do the work that others have between two layers (`pausing`)."""
        if (work := self._between) is not None:
            with self.pausing(None):
                work()

    def new_cache(self, capacity: int) -> PromptCache:
        if self.keeps_states:
            from kvtool.core.model.hf.states import StateCache  # of transformers

            shapes = dict(zip(self._attending, self.shapes, strict=True))
            return StateCache(self.config, lambda layer: (shapes[layer], capacity, self.dtype, self.device))
        return PromptCache([BufferLayer(shape, capacity, self.dtype, self.device) for shape in self.shapes])

    def host_memory(self, size: int) -> torch.Tensor:
        """Allocate uint8 on the CPU for what a pass gives: pinned where a GPU does, whose copies then do not wait."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.startswith("cuda"))

    def kv_bytes(self, tokens: int) -> int:
        return sum(shape.numbers for shape in self.shapes) * self.kv_dtype.itemsize * tokens

    @property
    def channels(self) -> int:
        return max(shape.channels for shape in self.shapes)

    @property
    def plain_shape(self) -> KVShape | None:
        """The shape that all layers have, keys as wide as values, as fast paths take it; None: they differ."""
        shape = self.shapes[0] if len(set(self.shapes)) == 1 and not self.shares else None
        return shape if shape is not None and shape.is_plain else None

    @property
    def stored_layers(self) -> int:
        return len(self.layers) if self.keeps_states else len(self.shapes)

    @property
    def shares(self) -> bool:
        return len(self.shapes) < len(self.kinds)

    def device_ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return int64 `[tokens]`. An unknown token may come from a store, and a GPU would not survive it."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise DamagedError(
                f"token {wrong} is none of the model's {vocabulary:,}",
                "`kvtool store verify`; where that finds nothing, the model's tokenizer is another's",
            )
        return torch.tensor(list(tokens)).to(self.device, non_blocking=True)

    def check_length(self, tokens: int, hint: str) -> None:
        if tokens > self.context:
            raise UsageError(f"the prompt has {tokens} tokens, the model takes {self.context}", hint)
