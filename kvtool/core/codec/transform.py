"""Transformed records: a profile's coefficients as whole numbers, one stream a layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import integers as whole
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.entropy.coder import Decoding, decode_batch, encode, refine_batch
from kvtool.core.codec.layout import SIDES, Layout
from kvtool.core.codec.levels import LOSSY
from kvtool.core.codec.payload import MOST_NUMBER, Coded, Escapes, Predictor
from kvtool.core.codec.profile import CodedColumns, Profile
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
    nearest = values.round_().clamp_(-MOST_NUMBER, MOST_NUMBER - 1).to(torch.int16).numpy()
    made = np.empty if layout.size == layout.padded else np.zeros
    out = made((sides.shape[1], layout.stride), np.int16)
    for side in range(SIDES):
        for group in range(layout.groups):
            start = layout.start(side, group)
            out[:, start : start + layout.size] = nearest[side, group]
    return out


def pack(profile: Profile, layer: int, level: str, numbers: I16, refine: bool) -> Coded:
    """A record of a level's numbers `[tokens, stride]`, alone or as what the coarser level lacks. States no error."""
    own = profile.coded(level, layer)
    taken = _taken(profile.layout, own, numbers)
    if refine:
        symbols, contexts = whole.refinement(taken, whole.coarsened(taken))
        stream = encode(symbols, own.fine_ids, profile.tables, contexts)
        columns, marked = np.empty(0, np.int64), np.empty(0, np.int16)
    else:
        symbols, marks = whole.to_symbols(taken, own.ids, profile.bounds)
        stream = encode(symbols, own.ids, profile.tables)
        columns = np.flatnonzero(marks.any(0))
        marked = taken[:, columns][marks[:, columns]]
    places = _outside(profile.layout, own, numbers)
    return Coded(
        predictors=_BOTH,
        level=LOSSY.index(level) + 1,
        base=LOSSY.index(level) + 2 if refine else 0,
        tokens=len(numbers),
        columns=len(own.columns),
        streams=(stream,),
        escapes=Escapes(
            places.astype(np.uint32), numbers.reshape(-1)[places], own.columns[columns].astype(np.uint16), marked
        ),
        profile=profile.digest,
    )


def _taken(layout: Layout, own: CodedColumns, numbers: I16) -> I16:
    """The columns that are coded, side by side."""
    if len(own.columns) == layout.stride:
        return numbers
    starts = range(0, layout.stride, layout.padded)
    return np.concatenate([numbers[:, at : at + width] for at, width in zip(starts, own.widths, strict=True)], 1)


def _outside(layout: Layout, own: CodedColumns, numbers: I16) -> npt.NDArray[np.int64]:
    """Flat places, ascending, of the numbers other than 0 in the other columns."""
    found = [np.empty(0, np.int64)]
    for group, width in enumerate(own.widths.tolist()):
        first, end = group * layout.padded + width, (group + 1) * layout.padded
        rest = numbers[:, first:end]
        if rest.any():
            rows, columns = np.nonzero(rest)
            found.append(rows * layout.stride + first + columns)
    return np.sort(np.concatenate(found))


def sides_of(
    profile: Profile, layer: int, level: str, numbers: I16, records: Sequence[Coded], dtype: torch.dtype
) -> torch.Tensor:
    """Sides `[2, tokens, C]` from the numbers `[tokens, stride]` of some records of one level, end to end."""
    layout = profile.layout
    back = profile.backward(layer, level, dtype)
    means = profile.means[layer].to(dtype).view(SIDES, layout.groups, layout.size)
    wide = torch.from_numpy(numbers).to(dtype)
    out = torch.empty((SIDES, len(numbers), layout.groups, layout.size), dtype=dtype)
    widths = profile.coded(level, layer).widths
    for side in range(SIDES):
        for group in range(layout.groups):
            start, width = layout.start(side, group), int(widths[side * layout.groups + group])
            taken = wide[:, start : start + width]
            torch.addmm(means[side, group], taken, back[side, group, :width], out=out[side, :, group])
    _add_outside(layout, back, widths, records, out)
    return out.view(SIDES, -1, layout.channels)


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
    for group, run in ((alone, decode_batch), (refined, refine_batch)):
        if group:
            run([_job(profile, layer, coded, out) for coded, _, out in group])
        for coded, _, out in group:
            coded.escapes.patch(out)


def _job(profile: Profile, layer: int, coded: Coded, out: I16) -> Decoding:
    own = profile.coded(LOSSY[coded.level - 1], layer)
    if coded.columns != len(own.columns) or coded.profile != profile.digest or coded.predictors != _BOTH:
        raise DamagedError("a compressed record that does not fit its profile")
    ids = own.fine_ids if coded.base else own.ids
    return Decoding(coded.streams[0], ids, profile.tables, coded.tokens, own.places, out)


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
        if not len(coded.escapes.places):
            first += coded.tokens
            continue
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
