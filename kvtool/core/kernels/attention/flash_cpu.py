"""The `flash` backend: FlashAttention in machine code of our own, on the CPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtool.core.kernels import FORMATS
from kvtool.core.kernels.attention.flash_ir import JOB, Tiling, attention_module
from kvtool.core.kernels.attention.params import KV, AttentionCall, AttentionParams, KeyRanges, Spans
from kvtool.core.kernels.attention.sdpa import has_tiles
from kvtool.core.native.isa import AVX512_BF16, isa_here, multiplies_bfloat16
from kvtool.core.native.jit import LINE, Function, address, compile_once, compiled, scratch
from kvtool.core.native.threads import launch

name = "flash"


def declines(call: AttentionCall) -> str:
    """By features of the CPU, never by the clock; measured in samples/results/speed.md."""
    if call.device != "cpu":
        return "it runs on CPUs"
    if call.rows == 1 and not call.is_asked and not call.packed and not call.is_shaped:
        return "a single row reads each key once in torch's kernel"
    tiling = tiling_here(call.dtype)
    if tiling is None:
        return f"there is no machine code for {str(call.dtype).removeprefix('torch.')} on this CPU"
    if not call.is_asked and has_tiles(call.dtype):
        return "torch's fused kernel multiplies bfloat16 with this CPU's AMX tiles"
    if call.batch != 1 or call.gradient or call.scale <= 0 or call.on_device:
        return "it takes one prompt, rows that the host knows, a positive scale and no gradient"
    return shape_mismatch(call)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, ranges: KeyRanges
) -> torch.Tensor:
    return attend_packed(query, key, value, params, Spans([(0, len(ranges.last), 0)], ranges.limits, ranges.begins))


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    spans: Spans,
    lead_in: KV | None = None,
) -> torch.Tensor:
    tiling = tiling_here(query.dtype)
    assert tiling is not None, "it was declined"
    lead = None if lead_in is None else (lead_in[0][0], lead_in[1][0])
    return kernel(tiling)(query[0], key[0], value[0], params, spans, lead)[None]


def compile_ahead(dtype: torch.dtype) -> None:
    tiling = tiling_here(dtype)
    if tiling is not None:
        threading.Thread(target=kernel, args=(tiling,), name="kvtool-attention").start()


def tiling_here(dtype: torch.dtype) -> Tiling | None:
    """None: this CPU has none of the instruction sets."""
    stored, isa = FORMATS.get(dtype), isa_here()
    if stored is None or isa is None:
        return None
    if stored == "bfloat16" and multiplies_bfloat16(isa):
        return Tiling(AVX512_BF16, stored, pairs=True)
    return Tiling(isa, stored)


@compile_once
def kernel(tiling: Tiling) -> Kernel:
    """Compile the kernel of a tiling at its first use (0.15 s)."""
    return Kernel(tiling, *compiled(attention_module(tiling), tiling.isa, "run"))


COLUMNS = 16  # head dimensions are a multiple of it
MOST_GROUPED = 120  # most query heads of one key head: the smallest `max_rows` of any tiling
_NONE = -1e30  # a score so low that it never weighs anything, and still a number
_SHARES = 4  # pieces of work for each thread that even out what a block costs


@dataclass(frozen=True, slots=True)
class Kernel:
    tiling: Tiling
    function: Function

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
        rows: Spans,
        lead_in: KV | None = None,
    ) -> torch.Tensor:
        """Attend with query `[heads, rows, head_dim]`, key and value `[kv_heads, keys, …]`, and a `lead_in` that every
        row sees before its own. Returns `[heads, rows, value_dim]`, laid out with rows before heads."""
        query, key, value = map(_in_rows, (query, key, value))
        leads = None if lead_in is None else (_in_rows(lead_in[0]), _in_rows(lead_in[1]))
        self._check(query, key, value, rows, leads)
        out = query.new_empty((query.shape[1], query.shape[0], value.shape[2])).transpose(0, 1)
        threads = torch.get_num_threads()
        blocks = self._blocks(rows.spans, query.shape[0], key.shape[0], threads)
        threads = min(threads, len(blocks) * key.shape[0])
        size = self.tiling.scratch_bytes(query.shape[2], value.shape[2])
        size = -(-size // LINE) * LINE
        counters = torch.zeros(2, dtype=torch.int64)
        begins, rests = rows.begins, _rests(params, query.shape[0])
        assert begins is not None
        job = JOB.pack(
            **_laid_out(query, key, value, out, leads),
            **_scored(params),
            limits=rows.limits.data_ptr(),
            begins=begins.data_ptr(),
            rests=rests.data_ptr(),
            blocks=blocks.data_ptr(),
            count=len(blocks),
            counters=counters.data_ptr(),
            scratch=address(scratch("attention", size * threads, "uint8")),
            scratch_bytes=size,
        )
        launch(self.function, job, threads)
        return out

    def _check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Spans, leads: KV | None
    ) -> None:
        given = 0 if leads is None else leads[0].shape[1]
        call = AttentionCall.of(query[None], key[None], value[None], AttentionParams(1.0))
        if query.shape[2] != key.shape[2] or key.shape[:2] != value.shape[:2] or shape_mismatch(call):
            raise ValueError(f"no kernel for {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
        for lead, side in zip(leads or (), (key, value), strict=False):
            if lead.dtype != side.dtype or lead.shape != (side.shape[0], given, side.shape[2]):
                raise ValueError(f"no kernel for a lead-in {tuple(lead.shape)}")
        if self.tiling.stored != FORMATS.get(query.dtype):
            raise ValueError(f"this is no kernel for {query.dtype}")
        if query.shape[1] != len(rows.limits) or rows.furthest >= given + key.shape[1]:
            raise ValueError(
                f"{len(rows.limits)} rows see keys up to {rows.furthest}: there are {given + key.shape[1]}"
            )

    def _blocks(self, spans: Sequence[tuple[int, int, int]], heads: int, kv_heads: int, threads: int) -> torch.Tensor:
        most = max(1, self.tiling.max_rows * kv_heads // heads)
        least = max(1, self.tiling.row_block * kv_heads // heads)
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


def _scored(params: AttentionParams) -> dict[str, float]:
    cap = params.softcap
    return {
        "bend": 0 if cap is None else -2 * math.log2(math.e) * params.scale / cap,
        "top": cap or 0.0,
        "scale": (params.scale if cap is None else 1.0) * math.log2(math.e),
    }


def _rests(params: AttentionParams, heads: int) -> torch.Tensor:
    """Each head's largest score before any key, float32 as products give it: its sink, or none."""
    if params.sinks is None:
        return torch.full((heads,), _NONE, dtype=torch.float32)
    if params.sinks.shape != (heads,):
        raise ValueError(f"{tuple(params.sinks.shape)} are no sinks of {heads} heads")
    rests = params.sinks.detach().to("cpu", torch.float32)
    return (rests / params.scale if params.softcap is None else rests).contiguous()


def _even(rows: int, most: int, least: int, kv_heads: int, threads: int) -> int:
    size = most
    while size > least:
        tasks = -(-rows // size) * kv_heads
        if tasks >= _SHARES * threads or tasks % threads == 0:
            break
        size -= 1
    return size


def shape_mismatch(call: AttentionCall) -> str:
    if call.mixed:
        return "queries, keys and values have different number formats"
    if call.heads % call.kv_heads or call.heads // call.kv_heads > MOST_GROUPED:
        return f"{call.heads} query heads over {call.kv_heads} of keys are no groups of at most {MOST_GROUPED}"
    if call.key_dim % COLUMNS or call.value_dim % COLUMNS:
        return f"a head's {call.key_dim} and {call.value_dim} numbers are no multiples of {COLUMNS}"
    return ""


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _where(name: str, tensor: torch.Tensor) -> dict[str, int]:
    head, row, _ = tensor.stride()
    return {name: tensor.data_ptr(), f"{name}_head": head, f"{name}_row": row}
