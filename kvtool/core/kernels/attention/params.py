"""Parameters of attention: what a layer asks for, which keys each row sees, and one call as a backend judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """Parameters of a layer's scores, and how far back a row sees. softcap: scores s become softcap · tanh(s / softcap)
    (Gemma 2, arXiv 2408.00118, section 2). sinks: float `[heads]`, one more score of each head, without a value
    (gpt-oss, arXiv 2508.10925, section 2)."""

    scale: float  # of products of queries and keys
    window: int | None = None  # a row sees the keys of so many positions, its own the last; None: all up to its own
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.is_unshaped

    @property
    def is_unshaped(self) -> bool:
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """The keys that each row sees: `first` … `last`, both ascending; `begins` and `limits` are the same on the device,
    int64."""

    last: Sequence[int]
    limits: torch.Tensor
    first: Sequence[int] | None = None  # None: 0 for all rows
    begins: torch.Tensor | None = None
    dense: bool = False  # row i is at place i, so plain causal attention serves where there are no further keys
    on_device: bool = False  # only the device knows `limits` (a captured graph); `last` is an upper bound
    _masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def run(cls, positions: range, window: int | None, device: torch.device | str) -> KeyRanges:
        at, dense = torch.arange(positions.start, positions.stop, device=device), not positions.start
        if window is None:
            return cls(positions, at, dense=dense)
        first = [max(0, position - window + 1) for position in positions]
        return cls(positions, at, first, torch.tensor(first, device=device), dense)

    def __getitem__(self, rows: slice) -> KeyRanges:
        first = None if self.first is None else self.first[rows]
        return KeyRanges(self.last[rows], self.limits[rows], first, None if self.begins is None else self.begins[rows])

    def begin(self, row: int) -> int:
        return 0 if self.first is None else self.first[row]

    def are_causal(self, rows: int, keys: int, params: AttentionParams) -> bool:
        """Whether the rows are those of all keys, each sees the keys up to its own, and nothing shapes the scores."""
        return self.dense and rows == keys > 1 and params.is_plain

    def hidden(self, rows: slice, first: int, stop: int) -> torch.Tensor:
        """bool `[rows, stop - first]`: which of the keys from `first` on some rows do not see."""
        keys = torch.arange(first, stop, device=self.limits.device)
        hidden = keys > self.limits[rows, None]
        return hidden if self.begins is None else hidden | (keys < self.begins[rows, None])

    def mask(self, rows: slice, first: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to scores, `[rows, stop - first]`: 0, or -inf where `hidden`."""
        hidden = self.hidden(rows, first, stop)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

    def device_mask(self, keys: int, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, keys]`, made once for all layers of a kind: a kernel would make some for every layer."""
        if dtype not in self._masks:
            self._masks[dtype] = self.mask(slice(None), 0, keys, dtype)
        return self._masks[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Runs of query rows, each over its own keys. `limits` and `begins`: int64 `[rows]` on the CPU, the last and first
    key that a row sees, from its span's first, after the lead-in, ascending. `furthest`: the last key that any row
    sees."""

    spans: Sequence[tuple[int, int, int]]  # first row, rows and first own key of each, in the order of the rows
    limits: torch.Tensor
    begins: torch.Tensor | None = None
    furthest: int = field(init=False)

    def __post_init__(self) -> None:
        """Check all bounds, since machine code knows none."""
        done, furthest, limits = 0, -1, self.limits
        begins = torch.zeros_like(limits) if self.begins is None else self.begins
        if not (_are_whole(limits) and _are_whole(begins) and limits.shape == begins.shape):
            raise ValueError("limits and begins are int64 numbers in a row")
        if self.begins is not None and not bool(((begins >= 0) & (begins <= limits)).all()):
            raise ValueError("a row sees nothing")
        object.__setattr__(self, "begins", begins)
        for first, count, start in self.spans:
            if first != done or count < 1 or start < 0 or first + count > len(limits):
                raise ValueError(f"rows {first} to {first + count} are no span behind row {done}")
            done += count
            furthest = max(furthest, start + int(limits[done - 1]))
        if not done or done != len(limits) or int(limits.min()) < 0:
            raise ValueError("spans do not cover the rows, or a row sees nothing")
        object.__setattr__(self, "furthest", furthest)


def _are_whole(numbers: torch.Tensor) -> bool:
    return numbers.dtype == torch.int64 and numbers.is_contiguous() and numbers.device.type == "cpu"


class AttentionCall(NamedTuple):
    device: str
    dtype: torch.dtype  # of queries
    heads: int = 8
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    rows: int = 64
    keys: int = 1024
    batch: int = 1
    scale: float = 0.125
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    causal: bool = False  # see `KeyRanges.are_causal`
    packed: bool = False  # the rows are chunks side by side, each of which sees itself and a lead-in only
    on_device: bool = False  # see `KeyRanges`
    gradient: bool = False  # queries require one
    mixed: bool = False  # keys or values have another dtype
    is_asked: bool = False  # the environment asks for the backend: no preference for another counts

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
        ranges: KeyRanges | None = None,
    ) -> AttentionCall:
        """Describe tensors `[batch, heads, rows, head_dim]`; `ranges` None: they are packed."""
        batch, heads, rows, _ = query.shape
        _, kv_heads, keys, key_dim = key.shape
        return cls(
            device=query.device.type,
            dtype=query.dtype,
            heads=heads,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value.shape[3],
            rows=rows,
            keys=keys,
            batch=batch,
            scale=params.scale,
            window=params.window,
            softcap=params.softcap is not None,
            sinks=params.sinks is not None,
            causal=ranges is not None and ranges.are_causal(rows, keys, params),
            packed=ranges is None,
            on_device=ranges is not None and ranges.on_device,
            gradient=query.requires_grad,
            mixed=not query.dtype == key.dtype == value.dtype,
        )

    @property
    def is_shaped(self) -> bool:
        return self.softcap or self.sinks
