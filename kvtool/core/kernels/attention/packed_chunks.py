"""Attention of chunks that stand side by side in one row, each behind the same lead-in and blind to the others.

Nothing is padded, and what a chunk gives depends on its own rows and the lead-in only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from kvtool.core.kernels.attention.dispatch import attend_rows, own_kernel
from kvtool.core.kernels.attention.flash.kernel import Spans
from kvtool.core.kernels.attention.params import Scoring, Seen

KV = tuple[torch.Tensor, torch.Tensor]
Watch = Callable[[torch.Tensor, torch.Tensor, Scoring], None]


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
    """Says where chunks stand in a packed row, and attends so that each sees itself and the lead-in only.

    Attributes
    ----------
    spans : start and stop of each chunk.
    lead_in : rotated keys and values of the lead-in, `[1, kv_heads, lead-in tokens, head_dim]` for each layer; or none.
    watches : one for each of the first chunks, shown every layer's queries `[heads, rows, head_dim]` of it, the keys
        before and in it `[kv_heads, keys, head_dim]`, the lead-in's among them, and the scoring.
    """

    spans: tuple[tuple[int, int], ...]
    lead_in: Sequence[KV]
    _rows: Spans
    watches: Sequence[Watch] = ()
    _windows: dict[int | None, Spans] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int], lead_in: Sequence[KV], watches: Sequence[Watch] = ()) -> SideBySide:
        """Place chunks of these lengths one after the other."""
        stops = list(accumulate(lengths))
        starts = [0, *stops[:-1]]
        leads = lead_in[0][0].shape[2] if lead_in else 0
        limits = torch.cat([torch.arange(leads, leads + length) for length in lengths])
        rows = Spans([(start, length, start) for start, length in zip(starts, lengths, strict=True) if length], limits)
        return cls(tuple(zip(starts, stops, strict=True)), lead_in, rows, watches)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of one layer.

        Parameters
        ----------
        query : `[1, heads, rows, head_dim]`.
        key, value : `[1, kv_heads, rows, head_dim]`: the chunks' own.

        Returns
        -------
        `[1, heads, rows, head_dim]`.
        """
        for watch, (start, stop) in zip(self.watches, self.spans, strict=False):
            keys, _ = self._visible(layer, key[:, :, start:stop], value[:, :, start:stop])
            watch(query[0, :, start:stop], keys[0], scoring)
        own = own_kernel(query, key, value, scoring.scale)
        if own is not None:
            lead_in = (self.lead_in[layer][0][0], self.lead_in[layer][1][0]) if self.lead_in else None
            return own(query[0], key[0], value[0], scoring, self._through(scoring.window), lead_in)[None]
        # Rows before heads: the model wants them so, and its own transposition then copies nothing.
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
        for start, stop in self.spans:
            keys, values = self._visible(layer, key[:, :, start:stop], value[:, :, start:stop])
            out[:, :, start:stop] = _as_rows(query[:, :, start:stop], keys, values, scoring)
        return out

    def _through(self, window: int | None) -> Spans:
        if window not in self._windows:
            begins = None if window is None else (self._rows.limits - (window - 1)).clamp_min_(0)
            self._windows[window] = replace(self._rows, begins=begins)
        return self._windows[window]

    def _visible(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KV:
        if not self.lead_in:
            return key, value
        lead_keys, lead_values = self.lead_in[layer]
        return torch.cat([lead_keys, key], 2), torch.cat([lead_values, value], 2)


def _as_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attend with the last rows of a causal attention, in the kernel that is fast here."""
    last = range(key.shape[2] - query.shape[2], key.shape[2])
    return attend_rows(query, key, value, scoring, Seen.run(last, scoring.window, query.device))
