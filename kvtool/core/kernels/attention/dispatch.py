"""Attention of rows that see the keys up to their own: which kernel is the fast one where."""

from __future__ import annotations

import functools
import threading
import warnings

import torch
import torch.nn.functional as F

from kvtool.core.common.arithmetic import cpu_features
from kvtool.core.common.switches import ATTENTION, asked
from kvtool.core.errors import UsageError
from kvtool.core.kernels.attention.cuda_rows import attend_on_cuda
from kvtool.core.kernels.attention.eager import attend_by_weights
from kvtool.core.kernels.attention.flash.kernel import Kernel, Spans, kernel, takes
from kvtool.core.kernels.attention.flash.tiling import Tiling
from kvtool.core.kernels.attention.params import Scoring, Seen
from kvtool.core.kernels.attention.products import attend_by_products
from kvtool.core.native.compiling import runnable
from kvtool.core.native.isa import AVX2, AVX512, AVX512_BF16, Isa

OWN, PRODUCTS, FUSED = KERNELS = ("own", "products", "fused")
# Rows are attended in blocks: one needs a mask of [BLOCK, keys up to its last row] only, and skips every later key.
BLOCK = 256
_GROUPED = 32  # rows; so few fill torch's kernel on the CPU only with the heads of a group below each other
_STORED = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def kernel_here(dtype: torch.dtype) -> str:
    """Name the kernel that is the fast one on this CPU, one of KERNELS; by its features, never by the clock.

    Measured on one core of an AMD EPYC (`samples/attention.py`), 15 % of 4,096 rows over 4,096 keys, heads of
    Qwen2.5-0.5B, GFLOP/s: bfloat16 with AVX-512 BF16 350 of the plain product's 460 (products 173, fused 55); float32
    with AVX2 102 of 104 (products 63, fused 54). Where AMX multiplies bfloat16, torch's fused kernel does it with that:
    it took half of the products' time on an Intel Xeon.

    Raises
    ------
    UsageError : the environment asks for a kernel that there is not.
    """
    wanted = asked(ATTENTION)
    if wanted not in ("", *KERNELS):
        raise UsageError(f"{ATTENTION}={wanted!r} is no kernel on a CPU", ", ".join(KERNELS))
    if wanted == OWN and tiling_here(dtype) is None:
        raise UsageError(f"{ATTENTION}={OWN}: there is none for this CPU", "products or fused")
    if wanted:
        return wanted
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return FUSED
    if tiling_here(dtype) is not None:
        return OWN
    return PRODUCTS


def tiling_here(dtype: torch.dtype) -> Tiling | None:
    """What our own attention kernels are made for here; None: they are for x86 CPUs with AVX2."""
    stored, isa = _STORED.get(dtype), isa_here()
    if stored is None or isa is None:
        return None
    if isa is AVX512 and stored == "bfloat16" and "avx512bf16" in cpu_features():
        return Tiling(AVX512_BF16, stored, pairs=True)
    return Tiling(isa, stored)


def isa_here() -> Isa | None:
    """The instruction set that the model's own machine code is made for here; None: there is none.

    What holds torch's kernels to less than the CPU has (`ATEN_CPU_CAPABILITY`) holds these too.
    """
    able, there = torch.backends.cpu.get_cpu_capability(), runnable()
    if able == "AVX512" and "avx512" in there:
        return AVX512
    return AVX2 if able.startswith("AVX") and "avx2" in there else None


def own_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Kernel | None:
    """Our own kernel, where it is the one to take for these tensors, each `[1, heads, rows, head_dim]`."""
    if query.device.type != "cpu" or len(query) != 1 or query.requires_grad or scale <= 0:
        return None
    tiling = tiling_here(query.dtype)
    if tiling is None or kernel_here(query.dtype) != OWN or not takes(query[0], key[0], value[0]):
        return None
    return _compiled(tiling)


@functools.cache
def _compiled(tiling: Tiling) -> Kernel | None:
    try:
        return kernel(tiling)
    except RuntimeError as error:
        warnings.warn(f"attention runs in torch's kernels: {error}", RuntimeWarning, stacklevel=2)
        return None


def compile_ahead(dtype: torch.dtype) -> None:
    """Compile what attends to numbers of this format here, in a thread, before anybody waits for it."""
    tiling = tiling_here(dtype)
    if tiling is not None and asked(ATTENTION) in ("", OWN):
        threading.Thread(target=_compiled, args=(tiling,), name="kvtool-attention").start()


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, seen: Seen
) -> torch.Tensor:
    """Attend with rows of which each sees keys of its own, in the kernel that is fast here.

    Parameters
    ----------
    query : `[1, heads, rows, head_dim]`.
    key, value : `[1, kv_heads, keys, head_dim]`.

    Returns
    -------
    `[1, heads, rows, head_dim]`.
    """
    scale = scoring.scale
    on_cuda = attend_on_cuda(query, key, value, scoring, seen.at, seen.begins)
    if on_cuda is not None:
        return on_cuda
    if len(seen.last) == 1 and scoring.is_unshaped:
        span = slice(seen.begin(0), seen.last[0] + 1)
        return attend_one(query, key[:, :, span], value[:, :, span], scale)
    own = own_kernel(query, key, value, scale)
    if own is not None:
        rows = Spans([(0, len(seen.last), 0)], seen.at, seen.begins)
        return own(query[0], key[0], value[0], scoring, rows)[None]
    if not scoring.is_unshaped:
        return attend_by_weights(query, key, value, scoring, seen)
    if scoring.window is None and query.device.type == "cpu" and kernel_here(query.dtype) != FUSED:
        return attend_by_products(query, key, value, scale, seen.last, seen.at)
    return attend_in_blocks(query, key, value, scale, seen)


def attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend with one row that sees all keys.

    The query heads of a group stand as rows, so that each key is read once and nothing is masked.
    """
    kv_heads, head_dim = key.shape[1], query.shape[3]
    out = _sdpa(query.reshape(1, kv_heads, -1, head_dim), key, value, None, scale)
    return out.reshape(1, query.shape[1], 1, value.shape[3])


def attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: Seen
) -> torch.Tensor:
    """Do what :func:`attend_rows` does in the device's own fused kernel, block by block."""
    # Rows before heads: the model wants them so, and its own transposition then copies nothing.
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
    for begin in range(0, len(seen.last), BLOCK):
        rows = slice(begin, min(begin + BLOCK, len(seen.last)))
        keys = slice(seen.begin(begin), seen.last[rows.stop - 1] + 1)
        mask = _mask(seen.hidden(rows, keys.start, keys.stop), query.dtype)
        out[:, :, rows] = _block(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask, scale)
    return out


def _block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    heads, rows, head_dim = query.shape[1:]
    if query.device.type == "cpu" and rows > _GROUPED:
        return _sdpa(query, key, value, mask[None, None], scale)
    # Query heads that share a key stand below each other as rows: with a mask CUDA's fused kernels take no grouped
    # heads, and keys repeated for every head would be copied for every block.
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    part = query.reshape(1, kv_heads, groups * rows, head_dim)
    return _sdpa(part, key, value, mask.repeat(groups, 1), scale).reshape(1, heads, rows, value.shape[3])


def _mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask `[rows, keys]`: truths, or on the CPU numbers, of which its kernel would make some anew for every head."""
    if hidden.device.type != "cpu":
        return ~hidden
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
