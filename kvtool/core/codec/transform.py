"""Transformed records: a profile's coefficients as whole numbers, one stream a layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import integers as whole
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.entropy.coder import Decoding, decode_batch, encode, refine_batch
from kvtool.core.codec.layout import BLOCK, SIDES, Layout, columns_of
from kvtool.core.codec.levels import LOSSY
from kvtool.core.codec.payload import Coded, Escapes, Predictor
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.raw import DTYPES
from kvtool.core.errors import DamagedError

I16 = npt.NDArray[np.int16]
_BOTH = (Predictor.TRANSFORM, Predictor.TRANSFORM)


def finest_numbers(layout: Layout, means: torch.Tensor, forward: torch.Tensor, sides: torch.Tensor) -> I16:
    """Numbers of the finest level, int16 `[tokens, stride]`, of a layer's sides, float32 `[2, tokens, C]`.

    `means` and `forward` are those of the profile at this layer.
    """
    grouped = (sides - means[:, None]).view(SIDES, -1, layout.groups, layout.size).transpose(1, 2)
    values = torch.matmul(grouped, forward)  # [2, groups, tokens, size]
    out = np.zeros((sides.shape[1], layout.stride), np.int16)
    for side in range(SIDES):
        for group in range(layout.groups):
            start = layout.start(side, group)
            out[:, start : start + layout.size] = whole.clipped(values[side, group].numpy())
    return out


def pack(profile: Profile, layer: int, level: str, finest: I16, refine: bool) -> Coded:
    """A record of one level from the finest numbers, alone or as what the next coarser level lacks. States no error."""
    at = LOSSY.index(level)
    fine = whole.coarsened(finest, at)
    places = profile.places(level, layer)
    columns = columns_of(places)
    tables = profile.tables
    coded_numbers = np.ascontiguousarray(fine[:, columns])
    left = fine.copy()
    left[:, columns] = 0
    marks = np.zeros(fine.shape, np.bool_)
    if refine:
        coarse = whole.coarsened(coded_numbers)
        symbols, contexts = whole.refinement(coded_numbers, coarse)
        stream = encode(symbols, profile.fine_ids[at, layer][columns], tables, contexts)
    else:
        ids = profile.ids[at, layer][columns]
        symbols, escapes = whole.to_symbols(coded_numbers, ids, profile.bounds)
        stream = encode(symbols, ids, tables)
        marks[:, columns] = escapes
    return Coded(
        predictors=_BOTH,
        level=at + 1,
        base=at + 2 if refine else 0,
        tokens=len(fine),
        columns=len(columns),
        streams=(stream,),
        escapes=Escapes.of(fine, marks, np.flatnonzero(left)),
        profile=profile.digest,
    )


def sides_of(
    profile: Profile, layer: int, level: str, numbers: I16, records: Sequence[Coded], dtype: torch.dtype
) -> torch.Tensor:
    """Sides `[2, tokens, C]` from the numbers `[tokens, stride]` of some records of one level, end to end."""
    layout = profile.layout
    back = profile.backward(layer, level, dtype)
    means = profile.means[layer].to(dtype).view(SIDES, layout.groups, layout.size)
    wide = torch.from_numpy(numbers).to(dtype)
    out = torch.empty((SIDES, len(numbers), layout.groups, layout.size), dtype=dtype)
    widths = _widths(profile, layer, level)
    for side in range(SIDES):
        for group in range(layout.groups):
            start, width = layout.start(side, group), int(widths[side * layout.groups + group])
            taken = wide[:, start : start + width]
            out[side, :, group] = torch.addmm(means[side, group], taken, back[side, group, :width])
    _add_outside(layout, back, widths, records, out)
    return out.view(SIDES, -1, layout.channels)


def _widths(profile: Profile, layer: int, level: str) -> npt.NDArray[np.int64]:
    """Columns of each group that are coded."""
    layout = profile.layout
    groups = profile.places(level, layer) // layout.padded
    return np.asarray(np.bincount(groups, minlength=SIDES * layout.groups) * BLOCK)


def decode(profile: Profile, layer: int, level: str, items: Sequence[tuple[Coded, Encoded]]) -> list[torch.Tensor]:
    """Sides `[2, tokens, C]` of several records of one level, profile and dtype.

    Raises
    ------
    DamagedError : a record that does not fit the profile or its shape.
    """
    tokens = [coded.tokens for coded, _ in items]
    ends = np.cumsum(tokens)
    dtype = DTYPES[items[0][1].dtype]
    numbers = np.zeros((int(ends[-1]), profile.layout.stride), np.int16)
    parts = [numbers[end - count : end] for end, count in zip(ends, tokens, strict=True)]
    fill(profile, layer, list(zip([coded for coded, _ in items], [item for _, item in items], parts, strict=True)))
    sides = sides_of(profile, layer, level, numbers, [coded for coded, _ in items], dtype)
    return [sides[:, end - count : end] for end, count in zip(ends, tokens, strict=True)]


def fill(profile: Profile, layer: int, jobs: Sequence[tuple[Coded, Encoded, I16]]) -> None:
    """Decode records into zeroed numbers `[tokens, stride]`, coarser levels first; raises DamagedError."""
    alone = [job for job in jobs if not job[0].base]
    refined = [job for job in jobs if job[0].base]
    if refined:
        fill(profile, layer, [(_base_of(coded, item), _base_item(item), out) for coded, item, out in refined])
    for group, run, ids in ((alone, decode_batch, profile.ids), (refined, refine_batch, profile.fine_ids)):
        if group:
            run([_job(profile, layer, coded, ids, out) for coded, _, out in group])
        for coded, _, out in group:
            coded.escapes.patch(out)


def _job(profile: Profile, layer: int, coded: Coded, ids: npt.NDArray[np.uint16], out: I16) -> Decoding:
    level = LOSSY[coded.level - 1]
    places = profile.places(level, layer)
    if coded.columns != len(places) * BLOCK or coded.profile != profile.digest or coded.predictors != _BOTH:
        raise DamagedError("a compressed record that does not fit its profile")
    return Decoding(
        coded.streams[0],
        ids[coded.level - 1, layer][columns_of(places)],
        profile.tables,
        coded.tokens,
        places,
        out,
    )


def _base_item(item: Encoded) -> Encoded:
    if item.base is None:
        raise DamagedError("a compressed record without the level that it refines")
    return item.base


def _base_of(coded: Coded, item: Encoded) -> Coded:
    base = Coded.parse(_base_item(item).payload)
    if (base.level, base.tokens) != (coded.base, coded.tokens):
        raise DamagedError("a compressed record that refines another one")
    return base


def _add_outside(
    layout: Layout,
    back: torch.Tensor,
    widths: npt.NDArray[np.int64],
    records: Sequence[Coded],
    out: torch.Tensor,
) -> None:
    """Add the escapes that stand in columns which are not coded: few, so each is a row of the basis."""
    first = 0
    for coded in records:
        rows, columns = np.divmod(coded.escapes.places.astype(np.int64), layout.stride)
        group, within = np.divmod(columns, layout.padded)
        outside = within >= widths[group]
        for number in np.unique(group[outside]):
            here = outside & (group == number)
            side, part = divmod(int(number), layout.groups)
            times = torch.from_numpy(coded.escapes.placed[here].astype(np.float32))[:, None].to(out.dtype)
            rows_here = torch.from_numpy(rows[here] + first)
            out[side, :, part].index_add_(0, rows_here, back[side, part, within[here]] * times)
        first += coded.tokens
