"""Transform encoding of a chunk's layers at several levels in a few calls; a record depends only on its own layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import torch

from kvtool.core import codec
from kvtool.core.codec import transform_kernels
from kvtool.core.codec.backend import CpuBackend, sides_of
from kvtool.core.codec.base import LayerKV, Payload, wide_sides
from kvtool.core.codec.levels import NESTED, check_of, coarser, level_of, nested
from kvtool.core.codec.profile import SIDES, CodedColumns, Profile
from kvtool.core.codec.rans.coder import Encoding, encode, finer_symbols, symbols_of
from kvtool.core.codec.rans.tables import I16, U32, Stream
from kvtool.core.codec.record import Escapes, Record
from kvtool.core.codec.row_subset import tail_of
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.native.job import scratch

ENCODED_AT_ONCE = 2 << 20  # bytes of keys and values, or one layer: what is made of them stays in a core's cache
_NO_BASES: Mapping[str, Sequence[Payload]] = MappingProxyType({})
_NOTHING, _NOWHERE = np.empty(0, np.int16), np.empty(0, np.uint32)


def encode_levels(
    kvs: Sequence[LayerKV],
    levels: Sequence[str],
    profile: Profile | None = None,
    bases: Mapping[str, Sequence[Payload]] = _NO_BASES,
) -> dict[str, list[Sequence[Payload]]]:
    """Encode all layers of one chunk at several levels: for each level the parts of each layer's record.

    A nested level refines the next coarser one where that is among `levels` or `bases`, stored records that were made
    with this profile, one a layer: both together take little more than the finer one. Keys and values are `[kv_heads,
    tokens, head_dim]`.

    Raises KvtoolError: a level needs a profile, and none is given; or a number is not finite.
    """
    made: dict[str, list[Sequence[Payload]]] = {}
    if together := nested(levels):
        made |= encode_nested(profile, range(len(kvs)), kvs, together, bases)
    return made | {level: [*codec.CODECS[level].encode_layers(kvs, profile)] for level in levels if level not in made}


def encode_rows(
    kvs: Sequence[LayerKV], rows: Ids, level: str, profile: Profile | None = None
) -> list[Sequence[Payload]]:
    """Encode some rows of a chunk's layers, ascending, at a level of row subsets; records refine no others."""
    inner, tokens = level_of(level).inner, kvs[0][0].shape[1]
    made = encode_levels(some_rows(kvs, rows), [inner], profile)[inner]
    return [[*parts, tail_of(rows, tokens)] for parts in made]


def some_rows(kvs: Sequence[LayerKV], rows: Ids) -> list[LayerKV]:
    at = torch.tensor(rows, dtype=torch.int64)
    return [(keys.index_select(1, at), values.index_select(1, at)) for keys, values in kvs]


def encode_nested(
    profile: Profile | None,
    layers: Sequence[int],
    kvs: Sequence[LayerKV],
    levels: Sequence[str],
    bases: Mapping[str, Sequence[Payload]] = _NO_BASES,
) -> dict[str, list[Sequence[Payload]]]:
    """Encode some layers of one chunk at some nested levels, as `encode_levels` does.

    Raises DamagedError: the profile is another model's; ValueError: sides have different shapes or formats;
    KvtoolError: there is no profile, or a number is not finite.
    """
    if profile is None:
        raise KvtoolError("this level needs a codec profile, and the store has none", "`kvtool compress` fits one")
    kvs = _check(profile, layers, kvs)
    order = sorted(levels, key=NESTED.index, reverse=True)  # coarsest first: a finer one names it
    made: dict[str, list[Sequence[Payload]]] = {level: [] for level in order}
    keys = kvs[0][0]
    step = max(1, ENCODED_AT_ONCE // max(1, SIDES * keys.numel() * keys.element_size()))
    for start, end in pairwise([*range(0, len(kvs), step), len(kvs)]):
        slab = _Slab(profile, layers[start:end], kvs[start:end])
        below: dict[str | None, list[Sequence[Payload]]] = {}
        below |= {level: [[record] for record in records[start:end]] for level, records in bases.items()}
        for level in order:
            below[level] = slab.records(level, below.get(coarser(level)))
            made[level] += below[level]
    return made


def _check(profile: Profile, layers: Sequence[int], kvs: Sequence[LayerKV]) -> list[LayerKV]:
    keys, layout = kvs[0][0], profile.layout
    if any(side.shape[1] != keys.shape[1] or side.dtype != keys.dtype for kv in kvs for side in kv):
        raise ValueError("keys and values of all layers have as many tokens and one format")
    shapes = {tuple(side.shape) for kv in kvs for side in kv}
    widest = max(heads * head_dim for heads, _, head_dim in shapes)
    if widest > layout.channels or not all(0 <= layer < profile.layers for layer in layers):
        raise DamagedError("a codec profile of another model")
    if len(shapes) == 1 and widest == layout.channels and keys.shape[0] % layout.groups == 0:
        return [(keys.cpu(), values.cpu()) for keys, values in kvs]
    wide = (wide_sides((keys.cpu(), values.cpu()), layout.channels) for keys, values in kvs)
    filled = (sides.view(SIDES, -1, layout.groups, layout.size).transpose(1, 2) for sides in wide)
    return [(sides[0], sides[1]) for sides in filled]


class _Slab:
    """Some layers of a chunk, and their numbers at each level that was asked for, in this thread's memory."""

    def __init__(self, profile: Profile, layers: Sequence[int], kvs: Sequence[LayerKV]) -> None:
        self._profile, self._layers, self._backend = profile, layers, CpuBackend()
        self._dtype, self._tokens = kvs[0][0].dtype, kvs[0][0].shape[1]
        self._exact = [side for kv in kvs for side in kv]  # K and V in turn
        self._numbers = {NESTED[0]: self._finest()}

    def records(self, level: str, bases: Sequence[Sequence[Payload]] | None) -> list[Sequence[Payload]]:
        coded = [self._profile.coded(level, layer) for layer in self._layers]
        refines = bases is not None and coded[0].fine is not None
        streams, marked = self._refined(level, coded) if refines else self._alone(level, coded)
        outside = self._outside(level, coded)
        flat = self._of(level).reshape(len(coded), -1)
        made = [
            Record(
                transformed=True,
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

    def _finest(self) -> I16:
        """int16 `[layers, tokens, stride]`. Raises KvtoolError: the source is not finite."""
        out = self._memory("finest")
        if not self._backend.make_finest(self._profile, self._layers, self._exact, out):
            raise KvtoolError("the KV holds numbers that are not finite", "keep it at the level raw or lossless")
        return out

    def _memory(self, name: str) -> I16:
        shape = (len(self._layers), self._tokens, self._profile.layout.stride)
        return scratch(name, int(np.prod(shape)), np.int16).reshape(shape)

    def _of(self, level: str) -> I16:
        if level not in self._numbers:
            finer = self._of(NESTED[NESTED.index(level) - 1])
            self._numbers[level] = coarsened(finer, self._memory(f"level {level}"))
        return self._numbers[level]

    def _alone(self, level: str, coded: Sequence[CodedColumns]) -> tuple[list[Stream], list[I16]]:
        found = symbols_of(self._of(level), [of.alone for of in coded])
        jobs = [Encoding(symbols, of.alone) for (symbols, _), of in zip(found, coded, strict=True)]
        return encode(*jobs), [marked for _, marked in found]

    def _refined(self, level: str, coded: Sequence[CodedColumns]) -> tuple[list[Stream], list[I16]]:
        columns = [of.fine for of in coded if of.fine is not None]
        found = finer_symbols(self._of(level), self._of(coarser(level) or ""), columns)
        jobs = [Encoding(symbols, of, contexts) for (symbols, contexts), of in zip(found, columns, strict=True)]
        return encode(*jobs), [_NOTHING] * len(coded)

    def _outside(self, level: str, coded: Sequence[CodedColumns]) -> list[U32]:
        """Find the places of numbers other than 0 in columns that are not coded."""
        numbers, places = self._of(level), list[U32]()
        for rows, used, columns in zip(numbers, np.bitwise_or.reduce(numbers, 1) != 0, coded, strict=True):
            used[columns.alone.numbers] = False
            places.append(np.flatnonzero(rows * used).astype(np.uint32) if used.any() else _NOWHERE)
        return places

    def _errors(self, level: str, records: Sequence[Record]) -> list[tuple[float, float]]:
        layout = self._profile.layout
        shape = (len(records), SIDES, self._tokens, layout.groups, layout.size)
        held = scratch("sides", int(np.prod(shape)) * self._dtype.itemsize, np.uint8)
        made = torch.from_numpy(held).view(self._dtype).view(shape)
        numbers, alone = torch.from_numpy(self._of(level)), [[record] for record in records]
        sides_of(self._profile, self._layers, level, numbers, alone, made, self._backend)
        heads, tokens, dim = self._exact[0].shape
        decoded = [*made.view(len(self._exact), tokens, heads, dim).transpose(1, 2)]
        with np.errstate(over="ignore", invalid="ignore"):  # no number then, which `Record.pack` refuses
            errors = np.array(transform_kernels.errors_of(decoded, self._exact), np.float32)
        up: list[float] = np.nextafter(errors, np.float32(np.inf)).tolist()
        return list(zip(up[::2], up[1::2], strict=True))


def coarsened(numbers: I16, out: I16 | None = None) -> I16:
    """Coarsen by one level: the nearest numbers of steps three times as wide, which nest by construction.

    Numbers are from -32767 to 32766.
    """
    nearest = np.add(numbers, np.int16(1), out=out)
    return np.floor_divide(nearest, np.int16(3), out=nearest)
