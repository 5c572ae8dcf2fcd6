"""The `flash` backend: FlashAttention in machine code of our own, on the CPU."""

from __future__ import annotations

import functools
import threading
import warnings

import torch

from kvtool.core.kernels.attention.flash_kernel import KV, Kernel, kernel, takes
from kvtool.core.kernels.attention.flash_tile_ir import KEYS, Tiling
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, KeyRanges, Spans
from kvtool.core.kernels.attention.sdpa import has_tiles
from kvtool.core.native.isa import AVX512_BF16, isa_here, multiplies_bfloat16

_STORED = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

name = "flash"


def declines(call: AttentionCall) -> str:
    """Return why this backend does not serve a call, or an empty string; by features of the CPU, never by the clock.

    Measured on one core of an AMD EPYC (`samples/attention.py`), 15 % of 4,096 rows over 4,096 keys, heads of
    Qwen2.5-0.5B, GFLOP/s: bfloat16 with AVX-512 BF16 350 of the plain product's 460 (`eager` 173, `sdpa` 55); float32
    with AVX2 102 of 104 (`eager` 63, `sdpa` 54).
    """
    if call.device != "cpu":
        return "it runs on CPUs"
    if call.rows == 1 and not call.asked and not call.packed and not call.is_shaped:
        return "a single row reads each key once in torch's kernel"
    tiling = tiling_here(call.dtype)
    if tiling is None:
        return f"there is no machine code for {str(call.dtype).removeprefix('torch.')} on this CPU"
    if not call.asked and has_tiles(call.dtype):
        return "torch's fused kernel multiplies bfloat16 with this CPU's AMX tiles"
    if call.batch != 1 or call.gradient or call.scale <= 0 or call.on_device:
        return "it takes one prompt, rows that the host knows, a positive scale and no gradient"
    return takes(call) or ("" if _compiled(tiling) is not None else "its machine code could not be made")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, ranges: KeyRanges
) -> torch.Tensor:
    """Attend: see `AttentionBackend`."""
    return attend_packed(query, key, value, params, Spans([(0, len(ranges.last), 0)], ranges.at, ranges.begins))


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    spans: Spans,
    lead_in: KV | None = None,
) -> torch.Tensor:
    """Attend with runs of rows, each over keys of its own: all of them in one call, which no thread waits in."""
    tiling = tiling_here(query.dtype)
    code = None if tiling is None else _compiled(tiling)
    assert code is not None, "it was declined"
    lead = None if lead_in is None else (lead_in[0][0], lead_in[1][0])
    return code(query[0], key[0], value[0], params, spans, lead)[None]


def first_read(first: int) -> int:
    """Return the first key that is read where no row sees one before `first`: tiles of keys are read whole."""
    return first // KEYS * KEYS


def compile_ahead(dtype: torch.dtype) -> None:
    """Compile what attends to numbers of this format here, in a thread, before anybody waits for it."""
    tiling = tiling_here(dtype)
    if tiling is not None:
        threading.Thread(target=_compiled, args=(tiling,), name="kvtool-attention").start()


def tiling_here(dtype: torch.dtype) -> Tiling | None:
    """Return what the kernel is made for here; None: this CPU has none of the instruction sets."""
    stored, isa = _STORED.get(dtype), isa_here()
    if stored is None or isa is None:
        return None
    if stored == "bfloat16" and multiplies_bfloat16(isa):
        return Tiling(AVX512_BF16, stored, pairs=True)
    return Tiling(isa, stored)


@functools.cache
def _compiled(tiling: Tiling) -> Kernel | None:
    try:
        return kernel(tiling)
    except RuntimeError as error:
        warnings.warn(f"attention runs in torch's kernels: {error}", RuntimeWarning, stacklevel=2)
        return None
