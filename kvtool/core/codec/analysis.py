"""Transformed records, encoded: layers of one chunk together, in a few calls of machine code (decoding: transform.py).

What a record becomes depends on its own layer alone, never on which others went with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import transform_kernels
from kvtool.core.codec.base import LayerKV, Payload
from kvtool.core.codec.entropy.encoder import Encoding, encode_all
from kvtool.core.codec.entropy.reference import Stream
from kvtool.core.codec.entropy.symbols import finer_symbols, has_strays, symbols_of, wider
from kvtool.core.codec.layout import SIDES, Layout, wide_sides
from kvtool.core.codec.nested import NESTED, check_of, coarser
from kvtool.core.codec.payload import Coded, Escapes
from kvtool.core.codec.profile import CodedColumns, Profile
from kvtool.core.codec.transform import BOTH, I16, add_outside, finest_numbers, sides_by_torch
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.native.job import scratch

AT_ONCE = 2 << 20  # bytes of keys and values, or one layer: what is made of them stays in a core's cache
_NO_BASES: Mapping[str, Sequence[Sequence[Payload]]] = MappingProxyType({})
_NOTHING, _NOWHERE = np.empty(0, np.int16), np.empty(0, np.uint32)


def encode(
    profile: Profile | None,
    layers: Sequence[int],
    kvs: Sequence[LayerKV],
    levels: Sequence[str],
    bases: Mapping[str, Sequence[Sequence[Payload]]] = _NO_BASES,
) -> dict[str, list[list[Payload]]]:
    """Encode keys and values `[kv_heads, tokens, head_dim]` of some layers of one chunk, at some nested levels.

    Parameters
    ----------
    bases : by level the records of these layers that are stored already with this profile, as parts.

    Returns
    -------
    For each level the parts of each layer's record. One refines the next coarser level where that is among `levels` or
    `bases`.

    Raises
    ------
    DamagedError : a profile of another model.
    ValueError : sides of different shapes or formats.
    KvtoolError : there is no profile; numbers that are not finite.
    """
    if profile is None:
        raise KvtoolError("this level needs a codec profile, and there is none", "`kvtool compress` fits one")
    kvs = _check(profile, layers, kvs)
    order = sorted(levels, key=NESTED.index, reverse=True)  # coarsest first: a finer one names it
    made: dict[str, list[list[Payload]]] = {level: [] for level in order}
    for start, end in pairwise(_cuts(kvs)):
        slab = _Slab(profile, layers[start:end], kvs[start:end])
        below: dict[str, Sequence[Sequence[Payload]]] = {}
        below |= {level: records[start:end] for level, records in bases.items()}
        for level in order:
            below[level] = own = slab.records(level, below.get(coarser(level) or ""))
            made[level] += own
    return made


def _check(profile: Profile, layers: Sequence[int], kvs: Sequence[LayerKV]) -> list[LayerKV]:
    """Everything that a kernel relies upon to stay inside of keys and values, which are given back as it takes them."""
    keys, layout = kvs[0][0], profile.layout
    if any(side.shape[1] != keys.shape[1] or side.dtype != keys.dtype for kv in kvs for side in kv):
        raise ValueError("keys and values of all layers have as many tokens and one format")
    shapes = {tuple(side.shape) for kv in kvs for side in kv}
    widest = max(heads * head_dim for heads, _, head_dim in shapes)
    if widest > layout.channels or not all(0 <= layer < profile.layers for layer in layers):
        raise DamagedError("a codec profile of another model")
    if len(shapes) == 1 and widest == layout.channels and keys.shape[0] % layout.groups == 0:
        return [(keys.cpu(), values.cpu()) for keys, values in kvs]
    return [_filled_up((keys.cpu(), values.cpu()), layout) for keys, values in kvs]


def _filled_up(kv: LayerKV, layout: Layout) -> LayerKV:
    """Sides of a layer as if a head were a group of the profile: `[groups, tokens, size]`."""
    wide = wide_sides(kv, layout.channels)
    keys, values = wide.view(SIDES, wide.shape[1], layout.groups, layout.size).transpose(1, 2)
    return keys, values


def _cuts(kvs: Sequence[LayerKV]) -> list[int]:
    """Where the layers are cut into slabs."""
    keys = kvs[0][0]
    step = max(1, AT_ONCE // max(1, SIDES * keys.numel() * keys.element_size()))
    return [*range(0, len(kvs), step), len(kvs)]


class _Slab:
    """Some layers of a chunk, and their numbers at each level that was asked for, in this thread's memory."""

    def __init__(self, profile: Profile, layers: Sequence[int], kvs: Sequence[LayerKV]) -> None:
        self._profile, self._layers, self._kvs = profile, layers, kvs
        self._dtype, self._tokens = kvs[0][0].dtype, kvs[0][0].shape[1]
        self._exact = transform_kernels.Places.of([side for kv in kvs for side in kv])  # K and V in turn
        self._numbers = {NESTED[0]: self._finest()}

    def records(self, level: str, bases: Sequence[Sequence[Payload]] | None) -> list[list[Payload]]:
        """Records at a level, as parts; those that refine others name them."""
        coded = [self._profile.coded(level, layer) for layer in self._layers]
        refines = bases is not None and coded[0].fine is not None
        streams, marked = self._refined(level, coded) if refines else self._alone(level, coded)
        outside = self._outside(level, coded)
        flat = self._of(level).reshape(len(coded), -1)
        made = [
            Coded(
                predictors=BOTH,
                level=NESTED.index(level) + 1,
                base=0 if bases is None else NESTED.index(level) + 2,
                tokens=self._tokens,
                columns=len(of.alone),
                streams=(stream,),
                escapes=Escapes(places, flat[number, places] if len(places) else _NOTHING, marks),
                profile=self._profile.digest,
                base_check=0 if bases is None else check_of(bases[number]),
            )
            for number, (of, stream, marks, places) in enumerate(zip(coded, streams, marked, outside, strict=True))
        ]
        for one, errors in zip(made, self._errors(level, made), strict=True):
            one.errors = errors
        return [one.pack() for one in made]

    # ---- numbers ----

    def _finest(self) -> I16:
        """int16 `[layers, tokens, stride]`. Raises KvtoolError where the source is not finite."""
        layout = self._profile.layout
        out = self._memory("finest")
        by = transform_kernels.forward_by(layout, self._dtype)
        if by is not None and out.size:
            weights = [self._profile.forward_weights(layer, by.tile) for layer in self._layers]
            finite = transform_kernels.numbers_of(layout, by, weights, self._exact, out)
        else:
            finite = self._finest_by_torch(out)
        if not finite:
            raise KvtoolError("the KV holds numbers that are not finite", "keep it at the level raw or lossless")
        return out

    def _finest_by_torch(self, out: I16) -> bool:
        profile = self._profile
        finite = True
        for number, (layer, kv) in enumerate(zip(self._layers, self._kvs, strict=True)):
            sides = torch.stack([side.transpose(0, 1).flatten(1) for side in kv]).float()
            finite &= bool(torch.isfinite(sides).all())
            out[number] = finest_numbers(profile.layout, profile.means[layer], profile.forward(layer), sides)
        return finite

    def _memory(self, name: str) -> I16:
        shape = (len(self._layers), self._tokens, self._profile.layout.stride)
        return scratch(name, int(np.prod(shape)), np.int16).reshape(shape)

    def _of(self, level: str) -> I16:
        """Numbers of a level."""
        if level not in self._numbers:
            finer = self._of(NESTED[NESTED.index(level) - 1])
            self._numbers[level] = wider(finer, self._memory(f"level {level}"))
        return self._numbers[level]

    # ---- what a record is made of ----

    def _alone(self, level: str, coded: Sequence[CodedColumns]) -> tuple[list[Stream], list[I16]]:
        """Streams, and the numbers of their escapes."""
        found = symbols_of(self._of(level), [of.alone for of in coded])
        streams = encode_all([Encoding(symbols, of.alone) for (symbols, _), of in zip(found, coded, strict=True)])
        return streams, [marked for _, marked in found]

    def _refined(self, level: str, coded: Sequence[CodedColumns]) -> tuple[list[Stream], list[I16]]:
        """Streams of what the coarser level lacks: they know no escapes."""
        columns = [of.fine for of in coded if of.fine is not None]
        found = finer_symbols(self._of(level), self._of(coarser(level) or ""), columns)
        jobs = [Encoding(symbols, of, contexts) for (symbols, contexts), of in zip(found, columns, strict=True)]
        return encode_all(jobs), [_NOTHING] * len(coded)

    def _outside(self, level: str, coded: Sequence[CodedColumns]) -> list[npt.NDArray[np.uint32]]:
        """Flat places, ascending, of the numbers other than 0 in columns that are not coded."""
        numbers = self._of(level)
        strays = has_strays(numbers, [of.others for of in coded])
        return [
            _places_outside(own, of) if some else _NOWHERE for own, of, some in zip(numbers, coded, strays, strict=True)
        ]

    # ---- errors ----

    def _errors(self, level: str, records: Sequence[Coded]) -> list[tuple[float, float]]:
        """The errors of K and of V that each record is to state, rounded up to float32."""
        made = self._sides(level, records).flatten(3)
        found = transform_kernels.errors_at(transform_kernels.Places.end_to_end(made, self._exact.heads), self._exact)
        errors = np.array(found, np.float32)
        up: list[float] = np.nextafter(errors, np.float32(np.inf)).tolist()
        return list(zip(up[::2], up[1::2], strict=True))

    def _sides(self, level: str, records: Sequence[Coded]) -> torch.Tensor:
        """What a decoder makes of the records: `[layers, 2, tokens, groups, size]`."""
        layout, numbers = self._profile.layout, self._of(level)
        shape = (len(records), SIDES, self._tokens, layout.groups, layout.size)
        held = scratch("sides", int(np.prod(shape)) * self._dtype.itemsize, np.uint8)
        out = torch.from_numpy(held).view(self._dtype).view(shape)
        by = transform_kernels.backward_by(layout, self._dtype)
        if by is not None and out.numel():
            widths = [self._profile.coded(level, layer).widths for layer in self._layers]
            weights = [self._profile.backward_weights(layer, level, self._dtype, by.tile) for layer in self._layers]
            transform_kernels.sides_of(layout, by, weights, widths, numbers, out)
        else:
            for layer, own, sides in zip(self._layers, numbers, out, strict=True):
                sides_by_torch(self._profile, layer, level, torch.from_numpy(own), sides)
        for layer, record, sides in zip(self._layers, records, out, strict=True):
            if len(record.escapes.places):
                add_outside(self._profile, layer, level, [record], sides)
        return out


def _places_outside(numbers: I16, coded: CodedColumns) -> npt.NDArray[np.uint32]:
    other = np.ones(numbers.shape[1], np.bool_)
    other[coded.alone.numbers] = False
    return np.flatnonzero(numbers * other).astype(np.uint32)
