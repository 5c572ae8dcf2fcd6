"""The Triton kernels behind `triton_rows.py`: a block of rows over its keys, and parts of the keys joined."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from kvtool.core.common.installing import install_line
from kvtool.core.errors import KvtoolError

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@functools.cache
def kernel() -> Any:
    """The kernel, of which triton makes one for each set of `constants` (see `triton_decode.py` in the codec)."""
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise KvtoolError(
            "this attention needs triton", f"{install_line('triton')}, or leave KVTOOL_ATTENTION away"
        ) from error
    globals()["tl"] = triton.language
    for part in (_keys_of, _begun, _read, _over, _written):
        globals()[part.__name__] = triton.jit(part)
    return triton.jit(do_not_specialize=["rows"])(_attend)  # else one more kernel for 1 row, and for multiples of 16


@functools.cache
def joining() -> Any:
    """The kernel that joins the parts."""
    kernel()  # which looks for triton
    import triton

    return triton.jit(do_not_specialize=["rows", "splits"])(_joined)  # else one more kernel for every number of parts


# Below: Triton, which takes no numbers of this module.


def _joined(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    part_split: tl.tensor,
    part_head: tl.tensor,
    part_row: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One row of one head: a part of which it sees nothing has -inf, and no share."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, column = tl.arange(0, SIZE).to(tl.int64), tl.arange(0, WIDTH)
    here = split < splits
    found = tl.load(sums + (split * tl.num_programs(1) + head) * rows + row, mask=here, other=float("-inf"))
    share = tl.exp2(found - tl.max(found, 0))
    place = split[:, None] * part_split + head * part_head + row * part_row + column[None, :]
    part = tl.load(parts + place, mask=here[:, None] & (column < DIM)[None, :], other=0.0)
    mixed = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    place = out + head * out_head + row * out_row + column
    tl.store(place, mixed.to(out.dtype.element_ty), mask=column < DIM)


def _attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    at: tl.tensor,
    begins: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    rows: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    value_head: tl.tensor,
    value_row: tl.tensor,
    out_split: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A block of rows, a head of keys and a part of the keys a program; `scale` and `cap` are of powers of two."""
    first = tl.program_id(0) * ROWS
    kv_head = tl.program_id(1).to(tl.int64)
    member = first + tl.arange(0, ROWS)
    row = member // GROUPS
    head = (kv_head * GROUPS + member % GROUPS).to(tl.int64)
    real = row < rows
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    position = tl.load(at + row, mask=real, other=-1)
    place = row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head + column[None, :]
    part = tl.load(query + place, mask=real[:, None] & inside[None, :], other=0.0)
    since = position * 0
    if WINDOWED:
        since = tl.load(begins + row, mask=real, other=0)
    begin, masked, end, high = _keys_of(at, begins, first, rows, WINDOWED, GROUPS, ROWS, KEYS)
    most, total = _begun(sinks, head, real, SUNK, ROWS)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    keys, values = key + kv_head * key_head, value + kv_head * value_head
    most, total, mixed = _over(
        begin, masked, high, part, keys, key_row, values, value_row, position, since, scale, cap, most, total, mixed,
        False, CAPPED, DIM, WIDTH, KEYS, PRECISION, WIDEN,
    )  # fmt: skip
    most, total, mixed = _over(
        masked, end, high, part, keys, key_row, values, value_row, position, since, scale, cap, most, total, mixed,
        True, CAPPED, DIM, WIDTH, KEYS, PRECISION, WIDEN,
    )  # fmt: skip
    split = tl.program_id(2).to(tl.int64)
    place = split * out_split + row.to(tl.int64)[:, None] * out_row + head[:, None] * out_head + column[None, :]
    found = sums + (split * tl.num_programs(1) * GROUPS + head) * rows + row
    _written(out + place, found, most, total, mixed, real, inside, PARTS)


def _keys_of(
    at: tl.tensor,
    begins: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    WINDOWED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The program's keys: where they begin, where they need a mask, where they end; and from where on no row sees."""
    # Below `low` every row of the block sees every key; from `high` on none does.
    low = tl.load(at + first // GROUPS) + 1
    high = tl.load(at + tl.minimum((first + ROWS - 1) // GROUPS, rows - 1)) + 1
    least = low * 0
    if WINDOWED:
        least = tl.load(begins + first // GROUPS) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(high - least, KEYS), tl.num_programs(2)) * KEYS
    begin = least + tl.program_id(2) * share
    end = tl.minimum(begin + share, high)
    masked = tl.minimum(tl.maximum(low // KEYS * KEYS, begin), end)
    if WINDOWED:
        masked = begin
    return begin, masked, end, high


def _begun(
    sinks: tl.tensor, head: tl.tensor, real: tl.tensor, SUNK: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest score and the sum of weights before any key: a sink's, which the first part counts, has no value."""
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SUNK:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        counted = tl.program_id(2) == 0
        most = tl.where(counted, sink, most)
        total = tl.where(counted, 1.0, total)
    return most, total


def _written(
    place: tl.tensor,
    sums: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    real: tl.tensor,
    inside: tl.tensor,
    PARTS: tl.constexpr,
) -> None:
    """Write what the rows have mixed; of a part of the keys, also the log2-sum-exp of its scores."""
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(place, mixed.to(place.dtype.element_ty), mask=real[:, None] & inside[None, :])
    if PARTS:
        found = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(sums, found, mask=real)


def _read(place: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """A block of keys or values; zeros where there is none."""
    if MASKED:
        return tl.load(place, mask=mask, other=0.0)
    else:
        return tl.load(place)


def _over(
    begin: tl.tensor,
    end: tl.tensor,
    high: tl.tensor,
    part: tl.tensor,
    keys: tl.tensor,
    key_row: tl.tensor,
    values: tl.tensor,
    value_row: tl.tensor,
    position: tl.tensor,
    since: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take in the keys from `begin` to `end`: the largest score so far, the sum of weights, and the mixed values."""
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS).to(tl.int64)
        here = at < high
        place = keys + (at * key_row)[None, :] + column[:, None]
        block = _read(place, here[None, :] & inside[:, None], MASKED or DIM != WIDTH)
        if WIDEN:
            score = tl.dot(part.to(tl.float32), block.to(tl.float32)) * scale
        else:
            score = tl.dot(part, block, input_precision=PRECISION) * scale
        if CAPPED:  # tanh(x) = 1 - 2 / (1 + e^2x), with e^2x as the power of two that `score / cap` is of
            score = cap * (1 - 2 / (1 + tl.exp2(score / cap * 2.8853900817779268)))
        if MASKED:
            seen = (at[None, :] <= position[:, None]) & (at[None, :] >= since[:, None])
            score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen no key yet
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(most - shift)
        place = values + (at * value_row)[:, None] + column[None, :]
        block = _read(place, here[:, None] & inside[None, :], MASKED or DIM != WIDTH)
        rounded = weight.to(block.dtype)
        if WIDEN:
            mixed = mixed * fade[:, None] + tl.dot(rounded.to(tl.float32), block.to(tl.float32))
        else:
            mixed = tl.dot(rounded, block, mixed * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weight, 1)
        most = highest
    return most, total, mixed
