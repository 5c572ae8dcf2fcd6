"""Transform coding by a fitted profile, levels `1` to `4`: small records with a stated loss (`kvtool help codec`).

Encoding turns keys and values to the profile's whole numbers, at several levels in a few calls, and these to streams; a
record depends only on its own layer. Decoding is the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.codec import cachegen
from kvtool.core.codec.base import (
    Codec,
    Device,
    Encoded,
    LayerKV,
    Payload,
    Profiles,
    channels_of,
    heads_of,
    no_profiles,
)
from kvtool.core.codec.decode import Parsed, decode_layers
from kvtool.core.codec.encode import encode_nested
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.record import Record
from kvtool.core.errors import DamagedError


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
