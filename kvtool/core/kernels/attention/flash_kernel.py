"""The attention kernels as functions of tensors: blocks of rows are laid out here, machine code does the rest."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from kvtool.core.kernels.attention.flash_ir import JOB, attention_module
from kvtool.core.kernels.attention.flash_tile_ir import Scratch, Tiling
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, Spans
from kvtool.core.native.jit import Function, compiled
from kvtool.core.native.job import LINE, scratch
from kvtool.core.native.threads import launch

COLUMNS = 16  # head dimensions are a multiple of it
MOST_GROUPED = 120  # query heads of one key's: the least number of lanes that a block has
_NONE = -1e30  # a score so low that it never weighs anything, and still a number
_SHARES = 4  # pieces of work for each thread that even out what a block costs

KV = tuple[torch.Tensor, torch.Tensor]
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Kernel:
    """Machine code of one tiling."""

    tiling: Tiling
    function: Function

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: AttentionParams,
        rows: Spans,
        lead_in: KV | None = None,
    ) -> torch.Tensor:
        """Attend.

        Parameters
        ----------
        query : `[heads, rows, head_dim]`.
        key, value : `[kv_heads, keys, head_dim]` and `[kv_heads, keys, value_dim]`.
        scoring : whose window is that of `rows`.
        lead_in : keys and values, laid out as those, that every row sees before its own.

        Returns
        -------
        `[heads, rows, value_dim]`, laid out with rows before heads: the model's own transposition then copies nothing.
        """
        query, key, value = map(_in_rows, (query, key, value))
        leads = None if lead_in is None else (_in_rows(lead_in[0]), _in_rows(lead_in[1]))
        self._check(query, key, value, rows, leads)
        out = query.new_empty((query.shape[1], query.shape[0], value.shape[2])).transpose(0, 1)
        threads = torch.get_num_threads()
        blocks = self._blocks(rows.spans, query.shape[0], key.shape[0], threads)
        threads = min(threads, len(blocks) * key.shape[0])
        size = Scratch.of(self.tiling).bytes(self.tiling, query.shape[2], value.shape[2])
        size = -(-size // LINE) * LINE
        counters = torch.zeros(2, dtype=torch.int64)
        begins, rests = rows.begins, _rests(scoring, query.shape[0])
        assert begins is not None
        job = JOB.pack(
            **_laid_out(query, key, value, out, leads),
            **_scored(scoring),
            limits=rows.limits.data_ptr(),
            begins=begins.data_ptr(),
            rests=rests.data_ptr(),
            blocks=blocks.data_ptr(),
            count=len(blocks),
            counters=counters.data_ptr(),
            scratch=scratch("attention", size * threads, "uint8").ctypes.data,
            scratch_bytes=size,
        )
        launch(self.function, ctypes.addressof(job), threads)
        return out

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Spans, leads: KV | None
    ) -> None:
        given = 0 if leads is None else leads[0].shape[1]
        if _refused(query, key, value) or key.shape[:2] != value.shape[:2]:
            raise ValueError(f"no kernel for {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
        if leads is not None and (_refused(query, *leads) or not (_alike(leads[0], key) and _alike(leads[1], value))):
            raise ValueError(f"no kernel for a lead-in {tuple(leads[0].shape)}")
        if self.tiling.stored != str(query.dtype).removeprefix("torch."):
            raise ValueError(f"this is no kernel for {query.dtype}")
        if query.shape[1] != len(rows.limits) or rows.furthest >= given + key.shape[1]:
            raise ValueError(
                f"{len(rows.limits)} rows see keys up to {rows.furthest}: there are {given + key.shape[1]}"
            )

    def _blocks(self, spans: Sequence[tuple[int, int, int]], heads: int, kv_heads: int, threads: int) -> torch.Tensor:
        """Spans cut into as many rows as a block takes, or fewer where threads would have none: int64 `[blocks, 3]`."""
        most = max(1, self.tiling.lanes * kv_heads // heads)
        least = max(1, self.tiling.strip * kv_heads // heads)
        if len(spans) == 1:
            most = _even(spans[0][1], most, least, kv_heads, threads)
        return torch.tensor(
            [
                (first + at, min(most, count - at), start)
                for first, count, start in spans
                for at in range(0, count, most)
            ],
            dtype=torch.int64,
        )


def _laid_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, leads: KV | None
) -> dict[str, int]:
    """Where the tensors are, and their shapes."""
    lead_key, lead_value = leads or (key, value)
    return {
        **_where("query", query),
        **_where("key", key),
        **_where("value", value),
        **_where("out", out),
        **_where("lead_key", lead_key),
        **_where("lead_value", lead_value),
        "leads": leads[0].shape[1] if leads else 0,
        "kv_heads": key.shape[0],
        "group": query.shape[0] // key.shape[0],
        "head_dim": query.shape[2],
        "value_dim": value.shape[2],
    }


def _scored(scoring: AttentionParams) -> dict[str, float]:
    """What makes a weight of a product: factors for powers of two, and the cap."""
    cap = scoring.softcap
    return {
        "bend": 0 if cap is None else -2 * math.log2(math.e) * scoring.scale / cap,
        "top": cap or 0.0,
        "scale": (scoring.scale if cap is None else 1.0) * math.log2(math.e),
    }


def _rests(scoring: AttentionParams, heads: int) -> torch.Tensor:
    """The largest score of each head before any key: its sink, or none; as what comes out of products, float32."""
    if scoring.sinks is None:
        return torch.full((heads,), _NONE, dtype=torch.float32)
    if scoring.sinks.shape != (heads,):
        raise ValueError(f"{tuple(scoring.sinks.shape)} are no sinks of {heads} heads")
    rests = scoring.sinks.detach().to("cpu", torch.float32)
    return (rests / scoring.scale if scoring.softcap is None else rests).contiguous()


def _even(rows: int, most: int, least: int, kv_heads: int, threads: int) -> int:
    """Rows of a block such that threads have the same to do."""
    size = most
    while size > least:
        tasks = -(-rows // size) * kv_heads
        if tasks >= _SHARES * threads or tasks % threads == 0:
            break
        size -= 1
    return size


def takes(call: AttentionCall) -> str:
    """Return why there is no kernel for a call's shapes, or an empty string."""
    if call.mixed:
        return "queries, keys and values have different number formats"
    if call.heads % call.kv_heads or call.heads // call.kv_heads > MOST_GROUPED:
        return f"{call.heads} query heads over {call.kv_heads} of keys are no groups of at most {MOST_GROUPED}"
    if call.key_dim % COLUMNS or call.value_dim % COLUMNS:
        return f"a head's {call.key_dim} and {call.value_dim} numbers are no multiples of {COLUMNS}"
    return ""


def kernel(tiling: Tiling) -> Kernel:
    """The kernel of a tiling, compiled at its first use (0.15 s).

    Raises
    ------
    RuntimeError : it cannot be compiled here.
    """
    with _compiling:
        return _kernel(tiling)


@cache
def _kernel(tiling: Tiling) -> Kernel:
    return Kernel(tiling, *compiled(attention_module(tiling), tiling.isa, "run"))


def _refused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether machine code, which knows no bounds, does not fit tensors `[heads, rows, head_dim]`."""
    call = AttentionCall.of(query[None], key[None], value[None], AttentionParams(1.0))
    return query.shape[2] != key.shape[2] or bool(takes(call))


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _alike(lead: torch.Tensor, own: torch.Tensor) -> bool:
    return lead.shape[0] == own.shape[0] and lead.shape[2] == own.shape[2]


def _where(name: str, tensor: torch.Tensor) -> dict[str, int]:
    head, row, _ = tensor.stride()
    return {name: tensor.data_ptr(), f"{name}_head": head, f"{name}_row": row}
