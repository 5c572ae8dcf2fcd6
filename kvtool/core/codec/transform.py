"""Transformed records: a profile's coefficients as whole numbers, one stream a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import integers as whole
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.entropy.decoder import HELD, Decoding, Form, decode_batch, refine_batch
from kvtool.core.codec.entropy.encoder import encode, to_symbols
from kvtool.core.codec.entropy.tables import ESCAPE
from kvtool.core.codec.layout import SIDES, Layout
from kvtool.core.codec.levels import LOSSY
from kvtool.core.codec.payload import MOST_NUMBER, Coded, Escapes, Predictor, in_form
from kvtool.core.codec.profile import CodedColumns, Profile
from kvtool.core.codec.raw import DTYPES
from kvtool.core.errors import DamagedError

I16 = npt.NDArray[np.int16]
Numbers = npt.NDArray[Any]  # int16, or bits of a float form
_FLOAT_FORMS: dict[str, Form] = {"bfloat16": "bfloat16", "float16": "float16"}
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
    marked = np.empty(0, np.int16)
    if refine and own.fine is not None:
        taken = _taken(profile.layout, own, numbers)
        symbols, contexts = whole.refinement(taken, whole.coarsened(taken))
        stream = encode(symbols, own.fine, contexts)
    else:
        symbols, escapes = to_symbols(numbers, own.alone)
        stream = encode(symbols, own.alone)
        if escapes:
            rows, which = np.divmod(np.flatnonzero(symbols == ESCAPE), symbols.shape[1])
            marked = numbers[rows, own.alone.numbers[which]]
    places = _outside(profile.layout, own, numbers)
    return Coded(
        predictors=_BOTH,
        level=LOSSY.index(level) + 1,
        base=LOSSY.index(level) + 2 if refine else 0,
        tokens=len(numbers),
        columns=len(own.alone),
        streams=(stream,),
        escapes=Escapes(places.astype(np.uint32), numbers.reshape(-1)[places], marked),
        profile=profile.digest,
    )


def _taken(layout: Layout, own: CodedColumns, numbers: I16) -> I16:
    """The columns that are coded, side by side."""
    if len(own.alone) == layout.stride:
        return numbers
    starts = range(0, layout.stride, layout.padded)
    return np.concatenate([numbers[:, at : at + width] for at, width in zip(starts, own.widths, strict=True)], 1)


def _outside(layout: Layout, own: CodedColumns, numbers: I16) -> npt.NDArray[np.int64]:
    """Flat places, ascending, of the numbers other than 0 in the other columns."""
    found = [np.empty(0, np.int64)]
    for group, width in enumerate(own.widths):
        first, end = group * layout.padded + width, (group + 1) * layout.padded
        rest = numbers[:, first:end]
        if rest.any():
            rows, columns = np.nonzero(rest)
            found.append(rows * layout.stride + first + columns)
    return np.sort(np.concatenate(found))


def sides_of(
    profile: Profile, layer: int, level: str, numbers: torch.Tensor, records: Sequence[Coded], dtype: torch.dtype
) -> torch.Tensor:
    """Sides `[2, tokens, C]` from the numbers `[tokens, stride]` of some records of one level, end to end.

    `numbers` are int16, or of this dtype.
    """
    layout = profile.layout
    back, means = profile.backward(layer, level, dtype)
    wide = numbers.to(dtype)
    out = torch.empty((SIDES, len(numbers), layout.groups, layout.size), dtype=dtype)
    widths = profile.coded(level, layer).widths
    for side in range(SIDES):
        for group in range(layout.groups):
            start, width = layout.start(side, group), widths[side * layout.groups + group]
            taken = wide[:, start : start + width]
            torch.addmm(means[side, group], taken, back[side, group, :width], out=out[side, :, group])
    _add_outside(layout, back, widths, records, out)
    return out.view(SIDES, -1, layout.channels)


def decode(profile: Profile, layer: int, level: str, items: Sequence[tuple[Coded, Encoded]]) -> torch.Tensor:
    """Sides `[2, tokens, C]` of several records of one level, profile and dtype, end to end.

    Raises
    ------
    DamagedError : a record that does not fit the profile or its shape.
    """
    tokens = [coded.tokens for coded, _ in items]
    ends = list(accumulate(tokens))
    name = items[0][1].dtype
    dtype = DTYPES[name]
    shape = (ends[-1], profile.layout.stride)
    if name in _FLOAT_FORMS and not any(coded.base for coded, _ in items):
        numbers = torch.empty(shape, dtype=dtype)
        form: Form = _FLOAT_FORMS[name]
    else:
        numbers = torch.zeros(shape, dtype=torch.int16)  # a finer level codes more columns than its base
        form = "int16"
    held = numbers.view(torch.int16).numpy().view(HELD[form])
    jobs = [(*item, held[end - count : end]) for item, end, count in zip(items, ends, tokens, strict=True)]
    fill(profile, layer, jobs, form)
    return sides_of(profile, layer, level, numbers, [coded for coded, _ in items], dtype)


def fill(profile: Profile, layer: int, jobs: Sequence[tuple[Coded, Encoded, Numbers]], form: Form = "int16") -> None:
    """Decode records into numbers `[tokens, stride]`, coarser levels first; raises DamagedError.

    Only coded columns are written, and for a form other than int16 none may be refined.
    """
    alone = [job for job in jobs if not job[0].base]
    refined = [job for job in jobs if job[0].base]
    if refined:
        fill(profile, layer, [(_base_of(coded, item), _base_item(item), out) for coded, item, out in refined])
    for group, run in ((alone, decode_batch), (refined, refine_batch)):
        run(_decodings(profile, layer, group, form))
        for coded, _, out in group:
            coded.escapes.place(out, form)


def _decodings(
    profile: Profile, layer: int, jobs: Sequence[tuple[Coded, Encoded, Numbers]], form: Form
) -> list[Decoding]:
    if not jobs:
        return []
    made, at = [], 0
    marked = in_form(np.concatenate([coded.escapes.marked for coded, _, _ in jobs]), form)  # all at once
    for coded, _, out in jobs:
        own = profile.coded(LOSSY[coded.level - 1], layer)
        columns = own.fine if coded.base else own.alone
        count = len(coded.escapes.marked)
        fits = columns is not None and coded.columns == len(columns) and coded.predictors == _BOTH
        if columns is None or not fits or coded.profile != profile.digest or (coded.base and count):
            raise DamagedError("a compressed record that does not fit its profile")
        marks = None if coded.base else marked[at : at + count]
        made.append(Decoding(coded.streams[0], columns, coded.tokens, out, form, marked=marks))
        at += count
    return made


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
    widths: Sequence[int],
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
        outside = within >= np.asarray(widths)[group]
        for number in np.unique(group[outside]):
            here = outside & (group == number)
            side, part = divmod(int(number), layout.groups)
            times = torch.from_numpy(coded.escapes.placed[here].astype(np.float32))[:, None].to(out.dtype)
            rows_here = torch.from_numpy(rows[here] + first)
            out[side, :, part].index_add_(0, rows_here, back[side, part, within[here]] * times)
        first += coded.tokens
