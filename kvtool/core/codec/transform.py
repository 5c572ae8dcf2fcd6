"""Transform coding by a fitted profile, levels `1` to `4`: small records with a stated loss (`kvtool help codec`).

Encoding turns keys and values to the profile's whole numbers, at several levels in a few calls, and these to streams; a
record depends only on its own layer. Decoding is the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, compress, pairwise
from types import MappingProxyType

import numpy as np
import torch

from kvtool.core import codec
from kvtool.core.codec import cachegen, transform_kernels
from kvtool.core.codec.backend import Backend, CpuBackend, Streams, backend_for, sides_of
from kvtool.core.codec.base import (
    DTYPES,
    Codec,
    Device,
    Encoded,
    LayerKV,
    Payload,
    Profiles,
    channels_of,
    heads_of,
    no_profiles,
    wide_sides,
)
from kvtool.core.codec.levels import NESTED, check_of, coarser, level_of, nested
from kvtool.core.codec.profile import SIDES, CodedColumns, Profile
from kvtool.core.codec.rans.coder import Encoding, encode, finer_symbols, symbols_of
from kvtool.core.codec.rans.tables import I16, U32, Stream
from kvtool.core.codec.record import Escapes, Record
from kvtool.core.codec.row_subset import tail_of
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.native.jit import has_triton, scratch

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


Parsed = tuple[Record, Encoded]
Work = tuple[int, Sequence[Parsed], Sequence[int]]  # a layer, some records of it, and the first row of each
DECODED_AT_ONCE = 1 << 20  # bytes of decoded numbers, or one layer's: what is made of them finds them in a core's cache


def decode_layers(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    items: Sequence[Sequence[Parsed]],
    device: Device = None,
) -> torch.Tensor:
    """Decode sides `[layers, 2, tokens, C]` of records of one level, profile and dtype.

    At each layer the records of the same chunks follow one another. Few calls do it, in which Python serves other
    threads. `device` is a GPU that decodes by triton. Raises DamagedError: a record does not fit the profile or its
    shape.
    """
    tokens = [record.tokens for record, _ in items[0]]
    if any([record.tokens for record, _ in some] != tokens for some in items):
        raise DamagedError("compressed records of a chunk that differ in length")
    layout, ends = profile.layout, list(accumulate(tokens))
    starts, rows = [end - count for end, count in zip(ends, tokens, strict=True)], ends[-1]
    shape = len(layers), SIDES, rows, layout.groups, layout.size
    out = torch.empty(shape, dtype=DTYPES[items[0][0][1].dtype], device=device)
    backend = backend_for(out.dtype, device)
    step = max(1, DECODED_AT_ONCE // max(1, 2 * rows * layout.stride))
    for first in range(0, len(layers), step):
        slab, parsed = layers[first : first + step], items[first : first + step]
        records = [[record for record, _ in chunks] for chunks in parsed]
        refined = any(record.base for chunks in records for record in chunks)  # a finer level codes more columns
        numbers = backend.allocate(len(slab) * rows, layout.stride, zeroed=refined)
        firsts = [[at * rows + start for start in starts] for at in range(len(slab))]
        fill(profile, list(zip(slab, parsed, firsts, strict=True)), numbers, backend)
        whole = numbers.view(len(slab), rows, layout.stride)
        sides_of(profile, slab, level, whole, records, out[first : first + step], backend)
    return out.flatten(3)


def decodes_there(device: str) -> bool:
    return device.startswith("cuda") and has_triton()


def fill(profile: Profile, work: Sequence[Work], numbers: torch.Tensor, backend: Backend) -> None:
    """Decode records of one level, coarser levels first, into their coded columns. Raises DamagedError."""
    for refines in (False, True):
        some = [one for one in (_chosen(*one, refines) for one in work) if one[1]]
        if refines and some:
            bases = [(layer, [_base_of(*item) for item in items], starts) for layer, items, starts in some]
            fill(profile, bases, numbers, backend)
        backend.decode([_streams(profile, *one, refines) for one in some], numbers)
    for _, items, starts in work:
        for (record, _), start in zip(items, starts, strict=True):
            if len(record.escapes.places):
                backend.place(record.escapes, numbers[start : start + record.tokens])


def _chosen(layer: int, items: Sequence[Parsed], starts: Sequence[int], refines: bool) -> Work:
    which = [bool(record.base) is refines for record, _ in items]
    return layer, list(compress(items, which)), list(compress(starts, which))


def _streams(profile: Profile, layer: int, items: Sequence[Parsed], starts: Sequence[int], refines: bool) -> Streams:
    records = [record for record, _ in items]
    coded = profile.coded(NESTED[records[0].level - 1], layer)
    columns = coded.fine if refines else coded.alone
    fits = columns is not None and all(
        record.columns == len(columns)
        and record.transformed
        and record.profile == profile.digest
        and record.level == records[0].level
        and not (columns.refines and len(record.escapes.marked))
        for record in records
    )
    if columns is None or not fits:
        raise DamagedError("a compressed record that does not fit its profile")
    return columns, records, starts


def _base_of(record: Record, item: Encoded) -> Parsed:
    if item.base is None:
        raise DamagedError("a compressed record without the level that it refines")
    base = Record.parse(item.base.payload)
    other = record.base_check != check_of([item.base.payload])
    if other or (base.level, base.tokens) != (record.base, record.tokens):
        raise DamagedError("a compressed record that refines another one than is stored")
    return base, item.base


class TransformCodec(Codec):
    """A level of transform coding. Before a store has a profile its chunks are encoded by CacheGen's scheme."""

    def __init__(self, level: str) -> None:
        self.level = level
        self._without_profile = cachegen.CacheGen(f"cachegen-{level}")

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> Sequence[Sequence[Payload]]:
        if profile is None:
            return self._without_profile.encode_layers(kvs)
        return encode_nested(profile, range(len(kvs)), kvs, [self.level])[self.level]

    def decode(
        self, items: Sequence[Encoded], layer: int = 0, profiles: Profiles = no_profiles, device: Device = None
    ) -> list[LayerKV]:
        """Decode several chunks at one layer to views; the CPU always decodes records without a profile. Raises
        DamagedError."""
        parsed = [(self._parsed(item), item) for item in items]
        together: dict[tuple[bool, bytes, str], list[int]] = {}
        for number, (record, item) in enumerate(parsed):
            together.setdefault((record.transformed, record.profile, item.dtype), []).append(number)
        out: dict[int, LayerKV] = {}
        for (transformed, digest, _), numbers in together.items():
            some = [parsed[number] for number in numbers]
            made = (
                self._transformed(profiles(digest), layer, some, device)
                if transformed
                else [cachegen.unpack(record, item.shape, item.dtype) for record, item in some]
            )
            out.update(zip(numbers, made, strict=True))
        return [out[number] for number in range(len(items))]

    def decode_layers(self, items: Sequence[Encoded], profiles: Profiles = no_profiles) -> list[LayerKV]:
        parsed = [(self._parsed(item), item) for item in items]
        alike = {(record.transformed, record.profile, item.dtype, item.shape[1]) for record, item in parsed}
        if len(alike) != 1 or not parsed[0][0].transformed:
            return super().decode_layers(items, profiles)
        profile, layers = profiles(parsed[0][0].profile), range(len(items))
        _check_fit(profile, layers, items)
        sides = decode_layers(profile, layers, self.level, [[one] for one in parsed])
        return [heads_of(own, item.shape) for own, item in zip(sides, items, strict=True)]

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        return Record.parse(payload).errors

    def _parsed(self, item: Encoded) -> Record:
        record = Record.parse(item.payload)
        if (record.level, record.tokens) != (NESTED.index(self.level) + 1, item.shape[1]):
            raise DamagedError("a compressed record of another level or length")
        return record

    def _transformed(self, profile: Profile, layer: int, items: Sequence[Parsed], device: Device) -> list[LayerKV]:
        _check_fit(profile, [layer], [item for _, item in items])
        sides = decode_layers(profile, [layer], self.level, [items], device)[0]
        each = sides.split_with_sizes([record.tokens for record, _ in items], 1)
        return [heads_of(own, item.shape) for own, (_, item) in zip(each, items, strict=True)]


def _check_fit(profile: Profile, layers: Sequence[int], items: Sequence[Encoded]) -> None:
    widest = channels_of([item.shape for item in items])
    if widest > profile.layout.channels or not 0 <= min(layers) <= max(layers) < profile.layers:
        raise DamagedError("a codec profile of another model")
