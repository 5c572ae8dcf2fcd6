"""Transformed records, decoded: a profile's coefficients as whole numbers, one stream a layer; encoded: analysis.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import transform_kernels
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.coefficient_buffer import HostNumbers, Numbers
from kvtool.core.codec.entropy.columns import Columns
from kvtool.core.codec.entropy.decoder import decode_all
from kvtool.core.codec.layout import SIDES, Layout
from kvtool.core.codec.nested import NESTED, check_of
from kvtool.core.codec.payload import MOST_NUMBER, Coded, Predictor
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.raw import DTYPES, NAMES
from kvtool.core.common.arithmetic import product_dtype
from kvtool.core.errors import DamagedError

I16 = npt.NDArray[np.int16]
Parsed = tuple[Coded, Encoded]
BOTH = (Predictor.TRANSFORM, Predictor.TRANSFORM)
AT_ONCE = 1 << 20  # bytes of decoded numbers, or one layer's: what is made of them finds them in a core's cache


def finest_numbers(layout: Layout, means: torch.Tensor, forward: torch.Tensor, sides: torch.Tensor) -> I16:
    """Numbers of the finest level, int16 `[tokens, stride]`, of a layer's sides, float32 `[2, tokens, C]`.

    `means` and `forward` are those of the profile at this layer.
    """
    tokens = sides.shape[1]
    made = np.empty if layout.size == layout.padded else np.zeros
    out = made((tokens, layout.stride), np.int16)
    by = transform_kernels.forward_by(layout, sides.dtype)
    if by is None or not tokens:
        _finest_by_torch(layout, means, forward, sides, out)
        return out
    weights = transform_kernels.Weights.of(
        [*forward.flatten(0, 1)], means.view(SIDES * layout.groups, layout.size), by.tile
    )
    heads = sides.view(SIDES, tokens, layout.groups, layout.size).transpose(1, 2)
    transform_kernels.numbers_of(layout, by, [weights], transform_kernels.Places.of([*heads]), out[None])
    return out


def _finest_by_torch(layout: Layout, means: torch.Tensor, forward: torch.Tensor, sides: torch.Tensor, out: I16) -> None:
    grouped = (sides - means[:, None]).view(SIDES, -1, layout.groups, layout.size).transpose(1, 2)
    values = torch.matmul(grouped, forward)  # [2, groups, tokens, size]
    nearest = values.round_().clamp_(-MOST_NUMBER, MOST_NUMBER - 1).to(torch.int16).numpy()
    for side in range(SIDES):
        for group in range(layout.groups):
            start = layout.start(side, group)
            out[:, start : start + layout.size] = nearest[side, group]


def sides_of(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    numbers: torch.Tensor,
    records: Sequence[Sequence[Coded]],
    out: torch.Tensor,
) -> None:
    """Make sides `[layers, 2, tokens, groups, size]` of the numbers `[layers, tokens, stride]` of records of one level,
    at each layer end to end.

    `numbers` are int16, or of the dtype of `out`.
    """
    by = None if numbers.is_cuda else transform_kernels.reading_by(profile.layout, out.dtype)
    if by is not None and out.numel():
        weights = [profile.backward_weights(layer, level, out.dtype, by.tile) for layer in layers]
        widths = [profile.coded(level, layer).widths for layer in layers]
        transform_kernels.sides_of(profile.layout, by, weights, widths, numbers.numpy(), out)
    else:
        for layer, own, sides in zip(layers, numbers, out, strict=True):
            sides_by_torch(profile, layer, level, own, sides)
    for layer, some, sides in zip(layers, records, out, strict=True):
        if any(len(coded.escapes.places) for coded in some):
            add_outside(profile, layer, level, some, sides)


def sides_by_torch(profile: Profile, layer: int, level: str, numbers: torch.Tensor, out: torch.Tensor) -> None:
    """In the format that is fast here, with weights rounded to the output's; on a GPU, where the products are the least
    of it, in float32: a number far from all others would show the weights' rounding."""
    layout, kept = profile.layout, torch.float32 if out.is_cuda else out.dtype
    dtype = torch.float32 if out.is_cuda else DTYPES[product_dtype(NAMES[out.dtype], out.device.type)]
    back, means = (part.to(dtype) for part in profile.backward(layer, level, kept, out.device))
    wide = numbers.to(kept).to(dtype)
    widths = profile.coded(level, layer).widths
    for side in range(SIDES):
        for group in range(layout.groups):
            start, width = layout.start(side, group), widths[side * layout.groups + group]
            taken = wide[:, start : start + width]
            out[side, :, group] = torch.addmm(means[side, group], taken, back[side, group, :width])


def decode(
    profile: Profile,
    layer: int,
    level: str,
    items: Sequence[Parsed],
    on: Callable[[tuple[int, int]], Numbers] | None = None,
) -> torch.Tensor:
    """Sides `[2, tokens, C]` of several records of one level, profile and dtype, end to end.

    Parameters
    ----------
    on : makes the numbers `[tokens, stride]`, all 0, where the streams are to be decoded; None: in main memory.

    Raises
    ------
    DamagedError : a record that does not fit the profile or its shape.
    """
    if on is None:
        return decode_layers(profile, [layer], level, [items])[0]
    starts, count = _laid_out(items)
    numbers = on((count, profile.layout.stride))
    fill(profile, layer, items, starts, numbers)
    out = torch.empty((1, *_shape(profile, count)), dtype=_dtype(items), device=numbers.tensor.device)
    sides_of(profile, [layer], level, numbers.tensor[None], [[coded for coded, _ in items]], out)
    return out.flatten(3)[0]


def decode_layers(
    profile: Profile, layers: Sequence[int], level: str, items: Sequence[Sequence[Parsed]]
) -> torch.Tensor:
    """Sides `[layers, 2, tokens, C]` in main memory of records of one level, profile and dtype, at each layer those of
    the same chunks end to end: few calls, in which Python serves other threads.

    Raises
    ------
    DamagedError : a record that does not fit the profile or its shape.
    """
    starts, count = _laid_out(items[0])
    if any([coded.tokens for coded, _ in some] != [coded.tokens for coded, _ in items[0]] for some in items):
        raise DamagedError("compressed records of a chunk that differ in length")
    out = torch.empty((len(layers), *_shape(profile, count)), dtype=_dtype(items[0]))
    step = max(1, AT_ONCE // max(1, 2 * count * profile.layout.stride))
    for first in range(0, len(layers), step):
        part = slice(first, first + step)
        _decode_slab(profile, layers[part], level, items[part], starts, out[part])
    return out.flatten(3)


def _decode_slab(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    items: Sequence[Sequence[Parsed]],
    starts: Sequence[int],
    out: torch.Tensor,
) -> None:
    rows = out.shape[2]
    shape = (len(layers) * rows, profile.layout.stride)
    nested = any(coded.base for some in items for coded, _ in some)
    if transform_kernels.reading_by(profile.layout, out.dtype) is not None:
        whole = HostNumbers.in_memory(shape, nested)
    else:
        whole = HostNumbers.of(shape, out.dtype, nested)
    parts = [whole.part(at * rows, (at + 1) * rows) for at in range(len(layers))]
    if nested:
        for layer, some, numbers in zip(layers, items, parts, strict=True):
            fill(profile, layer, some, starts, numbers)
    else:
        _fill_alone(profile, layers, level, items, starts, parts)
    records = [[coded for coded, _ in some] for some in items]
    sides_of(profile, layers, level, whole.tensor.view(len(layers), rows, -1), records, out)


def _fill_alone(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    items: Sequence[Sequence[Parsed]],
    starts: Sequence[int],
    parts: Sequence[HostNumbers],
) -> None:
    """Decode records that refine no other: all layers in one call."""
    jobs = []
    for layer, some, numbers in zip(layers, items, parts, strict=True):
        records = [coded for coded, _ in some]
        jobs.append(numbers.job(_fitting(profile, profile.coded(level, layer).alone, records), records, starts))
    decode_all(jobs)
    for some, numbers in zip(items, parts, strict=True):
        for (coded, _), start in zip(some, starts, strict=True):
            numbers.place(coded.escapes, start, coded.tokens)


def _laid_out(items: Sequence[Parsed]) -> tuple[list[int], int]:
    """First rows of records that stand end to end, and how many rows there are."""
    tokens = [coded.tokens for coded, _ in items]
    ends = list(accumulate(tokens))
    return [end - count for end, count in zip(ends, tokens, strict=True)], ends[-1]


def _shape(profile: Profile, tokens: int) -> tuple[int, int, int, int]:
    return SIDES, tokens, profile.layout.groups, profile.layout.size


def _dtype(items: Sequence[Parsed]) -> torch.dtype:
    return DTYPES[items[0][1].dtype]


def fill(profile: Profile, layer: int, items: Sequence[Parsed], starts: Sequence[int], numbers: Numbers) -> None:
    """Decode records of one level from their first rows on, coarser levels first; raises DamagedError.

    Only coded columns are written.
    """
    if not items:
        return
    level_columns = profile.coded(NESTED[items[0][0].level - 1], layer)
    alone = [number for number, (coded, _) in enumerate(items) if not coded.base]
    refined = [number for number, (coded, _) in enumerate(items) if coded.base]
    starts_of_refined = [starts[number] for number in refined]
    fill(profile, layer, [_base_of(*items[number]) for number in refined], starts_of_refined, numbers)
    for some, columns in ((alone, level_columns.alone), (refined, level_columns.fine)):
        if some:
            records = [items[number][0] for number in some]
            numbers.decode(_fitting(profile, columns, records), records, [starts[number] for number in some])
    for (coded, _), start in zip(items, starts, strict=True):
        numbers.place(coded.escapes, start, coded.tokens)


def _fitting(profile: Profile, columns: Columns | None, records: Sequence[Coded]) -> Columns:
    """The columns, if all records are theirs."""
    fits = columns is not None and all(
        coded.columns == len(columns)
        and coded.predictors == BOTH
        and coded.profile == profile.digest
        and coded.level == records[0].level
        and not (columns.refines and len(coded.escapes.marked))
        for coded in records
    )
    if columns is None or not fits:
        raise DamagedError("a compressed record that does not fit its profile")
    return columns


def _base_of(coded: Coded, item: Encoded) -> Parsed:
    if item.base is None:
        raise DamagedError("a compressed record without the level that it refines")
    base = Coded.parse(item.base.payload)
    other = coded.base_check and coded.base_check != check_of([item.base.payload])
    if other or (base.level, base.tokens) != (coded.base, coded.tokens):
        raise DamagedError("a compressed record that refines another one than is stored")
    return base, item.base


def add_outside(profile: Profile, layer: int, level: str, records: Sequence[Coded], out: torch.Tensor) -> None:
    """Add to sides `[2, tokens, groups, size]` of some records, end to end, the escapes that stand in columns which are
    not coded: few, so each is a row of the basis. They are large and cancel each other: summed up in float32."""
    layout, widths = profile.layout, np.asarray(profile.coded(level, layer).widths)
    back, _ = profile.backward(layer, level, torch.float32, out.device)
    first = 0
    for coded in records:
        rows, columns = np.divmod(coded.escapes.places.astype(np.int64), layout.stride)
        group, within = np.divmod(columns, layout.padded)
        outside = within >= widths[group]
        for number in np.unique(group[outside]):
            here = outside & (group == number)
            side, part = divmod(int(number), layout.groups)
            times = torch.from_numpy(coded.escapes.placed[here].astype(np.float32))[:, None].to(out.device)
            rows_here, which = (torch.from_numpy(some).to(out.device) for some in (rows[here] + first, within[here]))
            wide = out[side, first : first + coded.tokens, part].float()
            wide.index_add_(0, rows_here - first, back[side, part, which] * times)
            out[side, first : first + coded.tokens, part] = wide.to(out.dtype)
        first += coded.tokens
