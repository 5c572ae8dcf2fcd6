"""Prompt cache of a recurrent hybrid: some layers keep a state that all tokens have made, next to keys and values.

A state (a window of a convolution, a matrix of a recurrence) has no row for a token. It is valid after exactly the
tokens that made it, cannot be moved, and cannot be taken back to an earlier token unless it was saved there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.params import KV
from kvtool.core.model.forward import Pass
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache

CONV, RECURRENT = "conv", "recurrent"  # what a state consists of; either may be missing
CacheLayerMixin.register(BufferLayer)  # the forward of a hybrid recognises its attention layers by that
States = dict[tuple[str, int], torch.Tensor]  # by what it is and its number in the layer
StateForms = dict[tuple[str, int], tuple[torch.dtype, torch.Size]]  # of one layer, as its own forward makes them


class StateLayer(LinearAttentionLayer):
    """A layer's state in a prompt cache; the model's own forward updates it."""

    length = 0  # number of tokens that made the state

    def reserve(self, length: int) -> None:
        """Do nothing: a state has no rows."""

    def states(self) -> States:
        """Return the current state: the tensors themselves, which the next pass changes."""
        states: States = {}
        for number in range(self.number_of_states):
            for name, tensors in ((CONV, self.conv_states), (RECURRENT, self.recurrent_states)):
                if tensors[number] is not None:
                    states[name, number] = tensors[number]
        return states

    @torch.inference_mode()
    def take(self, states: States) -> None:
        for (name, number), tensor in states.items():
            if name == CONV:
                self.has_previous_state[number] = False  # else it would be appended to what is there
                self.update_conv_state(tensor, number)
            else:
                self.update_recurrent_state(tensor, number)


class StateAndRowsLayer(StateLayer, BufferLayer):
    """A layer that keeps both: attention next to a recurrence (Falcon-H1)."""

    def __init__(self, number_of_states: int, *rows: Any) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        BufferLayer.__init__(self, *rows)

    def reserve(self, length: int) -> None:
        BufferLayer.reserve(self, length)


class NothingLayer(DummyLayer):
    """A layer that keeps nothing: an MLP that counts as a layer (Nemotron-H)."""

    length = 0

    def reserve(self, length: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Marked:
    length: int
    states: tuple[States, ...]


class StateCache(Cache, PromptCache):
    """The prompt cache of a recurrent hybrid: for each layer keys and values, a state, both, or nothing. Rows are
    computed in order; states can be taken back only to where they were marked. `rows`: makes a layer's
    `BufferLayer`."""

    is_recurrent = True
    buffers: list[Any]

    def __init__(self, config: Any, rows: Callable[[int], tuple[Any, ...]]) -> None:
        kinds = DynamicCache(config=config).layers
        PromptCache.__init__(self, [_layer(kind, rows, number) for number, kind in enumerate(kinds)])
        Cache.__init__(self, layers=self.buffers)
        self.running: Pass | None = None
        self._marked: Marked | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        if self.running is None:
            raise ModelError("rows over a prompt cache need their positions", "this is a bug in kvtool")
        return self.running.write(layer_idx, key_states, value_states)

    @torch.inference_mode()
    def mark(self) -> Marked:
        """Save the current states: `set_length` can come back to this length, and `go_back` at any time."""
        copies = [{key: tensor.clone() for key, tensor in layer.states().items()} for layer in self.state_layers]
        self._marked = Marked(self.length, tuple(copies))
        return self._marked

    def go_back(self, marked: Marked) -> None:
        """Return to where this cache was marked; after an interruption the call can be repeated."""
        self._marked = marked
        self.set_length(marked.length)

    def set_length(self, length: int) -> None:
        """Declare the first `length` rows of every layer filled; fewer than there are only back to the last mark."""
        if any(layer.length > length for layer in self.state_layers):
            if self._marked is None or self._marked.length != length:
                raise ModelError(f"states after {self.length} tokens cannot go back to {length}", "a bug in kvtool")
            for layer, states in zip(self.state_layers, self._marked.states, strict=True):
                layer.take(states)
        super().set_length(length)

    @property
    def nbytes(self) -> int:
        rows = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.buffers if isinstance(layer, BufferLayer))
        layer_states = [layer.states() for layer in self.state_layers]
        marked = () if self._marked is None else self._marked.states
        return rows + sum(tensor.nbytes for states in (*layer_states, *marked) for tensor in states.values())

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        return [layer for layer in self.buffers if isinstance(layer, StateLayer)]

    @property
    def length(self) -> int:
        return max(int(layer.length) for layer in self.buffers)


def _layer(kind: Any, rows: Callable[[int], tuple[Any, ...]], number: int) -> Any:
    if isinstance(kind, LinearAttentionAndFullAttentionLayer):
        return StateAndRowsLayer(kind.number_of_states, *rows(number))
    if isinstance(kind, LinearAttentionLayer):
        return StateLayer(kind.number_of_states)
    return NothingLayer() if isinstance(kind, DummyLayer) else BufferLayer(*rows(number))
