"""Forward pass: its rows and their attention, what is called between its layers, and the loop over the layers, the same
on every device. `kernels/attention/dispatch.py` chooses the backend that computes attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.rope import CosSin
from kvtool.core.model.passes import Pass
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.rope import Rotary

Map = Callable[[torch.Tensor], torch.Tensor]
Threads = Callable[[int, bool], AbstractContextManager[object]]
# Rows of the last layer's end at least: a single one would take a matrix-vector kernel, whose sums depend on threads.
_TAIL = 16


class Heads(NamedTuple):
    """A layer's queries, keys and values before rotation: `[rows, heads · head_dim]` each, rows of adjacent numbers."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def of(self, rows: torch.Tensor) -> Heads:
        return Heads(*(side.index_select(0, rows) for side in self))


class Layer(Protocol):
    """One decoder layer; `exact` as of `Pass`."""

    @property
    def params(self) -> AttentionParams: ...

    def project(self, hidden: torch.Tensor, positions: torch.Tensor, exact: bool) -> Heads:
        """Norm rows `[rows, hidden]` at positions `[rows]`, and project them."""

    def rotate(self, heads: Heads, angles: CosSin | None) -> Heads:
        """Return rotated queries and keys, and values, `[1, heads, rows, head_dim]`. Those given may be overwritten."""

    def place(self, heads: Heads, angles: CosSin | None, places: torch.Tensor, buffer: BufferLayer) -> torch.Tensor:
        """Rotate heads, and write keys and values to their places in a buffer; return rotated queries."""

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor, exact: bool) -> torch.Tensor:
        """Add to rows what attention gives, `[rows, heads · head_dim]`, projected, and then the MLP."""


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What is before the first layer, and after the last one. `embed` gives `[rows, hidden]`, `logits` float32 `[rows,
    vocabulary]`; `threads` sets up those that compute a pass of so many rows, exact or not."""

    embed: Map
    logits: Map
    threads: Threads = lambda rows, exact: nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    rotary: Rotary
    pause: Callable[[], None]  # called before each layer: others may have work to do
    layers: Sequence[Layer]
    ends: Ends
    why: str = ""  # it is not as fast as it could be

    def logits(self, job: Pass, keep: int) -> torch.Tensor:
        """Compute a pass; return logits of its last `keep` rows, float32 `[keep, vocabulary]`."""
        with self.ends.threads(len(job.ids), job.exact):
            hidden = self.hidden(job, keep)
            assert hidden is not None, "a pass that ends early has no logits"
            return self.ends.logits(hidden)

    def fill(self, job: Pass) -> None:
        """Compute a pass up to the keys and values of the last layer."""
        with self.ends.threads(len(job.ids), job.exact):
            self.hidden(job, keep=0)

    def hidden(self, job: Pass, keep: int) -> torch.Tensor | None:
        """Return the last layer's output `[keep, hidden]` of the last rows; None where nothing needs it."""
        hidden, rows, on_layer, last = self.ends.embed(job.ids), job.placed, job.on_layer, len(self.layers) - 1
        positions, table = job.positions, self.rotary.table(job.positions)
        for number, layer in enumerate(self.layers):
            self.pause()
            heads, angles = layer.project(hidden, positions, job.exact), self.rotary.angles(table, number)
            if number in on_layer.narrows:
                copies = Heads(*(side.clone() for side in heads))
                chosen, rows = on_layer.choose(number, *layer.rotate(copies, angles)[1:])
                hidden, heads = hidden.index_select(0, chosen), heads.of(chosen)
                positions, table = positions[chosen], table[chosen]
                angles = self.rotary.angles(table, number)
            on_layer.before_write(number, len(hidden))
            if job.cache is None:
                queries, keys, values = layer.rotate(heads, angles)
                if on_layer.collect(number, keys, values):
                    return None
            else:
                buffer = job.cache.buffers[number]
                queries = layer.place(heads, angles, rows.places, buffer)
                on_layer.written(number)
                keys, values = buffer.view()
            if on_layer.attend(number, queries, keys, values, layer.params) or (number == last and not keep):
                return None
            if number == last and (tail := max(keep, _TAIL)) < len(hidden):  # nothing needs the others any more
                queries, hidden, rows = queries[:, :, -tail:], hidden[-tail:], rows.last(tail)
            attended = rows.attend(number, queries, keys, values, layer.params)
            hidden = layer.finish(attended.transpose(1, 2).reshape(len(hidden), -1), hidden, job.exact)
        return hidden[-keep:]
