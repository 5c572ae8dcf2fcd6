"""Transform coding by a fitted profile, levels `1` to `4`: small records with a stated loss (kvtool/docs/codec.md)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kvtool.core.codec import analysis, cachegen, transform
from kvtool.core.codec.base import Encoded, LayerKV, Payload, Profiles, no_profiles
from kvtool.core.codec.coefficient_buffer import DeviceNumbers
from kvtool.core.codec.layout import channels_of, heads_of
from kvtool.core.codec.nested import NESTED
from kvtool.core.codec.payload import Coded, Predictor, base_of
from kvtool.core.codec.profile import Profile
from kvtool.core.errors import DamagedError


class TransformCodec:
    """One lossy level. Before a store has a profile its chunks are encoded by the paper's scheme, and so read;
    `compress` makes them anew."""

    def __init__(self, level: str) -> None:
        self.level = level
        self._without_profile = cachegen.CacheGen(f"cachegen-{level}")

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0, profile: Profile | None = None
    ) -> list[Payload]:
        """Encode one layer's keys and values, each `[kv_heads, tokens, head_dim]`, as a record that stands alone."""
        if profile is None:
            return [*self._without_profile.encode(keys, values)]
        return analysis.encode(profile, [layer], [(keys, values)], [self.level])[self.level][0]

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> list[list[Payload]]:
        """Encode all layers of a chunk together."""
        if profile is None:
            return [[*parts] for parts in self._without_profile.encode_layers(kvs)]
        return analysis.encode(profile, range(len(kvs)), kvs, [self.level])[self.level]

    def decode(
        self,
        items: Sequence[Encoded],
        layer: int = 0,
        profiles: Profiles = no_profiles,
        device: torch.device | None = None,
    ) -> list[LayerKV]:
        """Keys and values of several chunks at one layer: views `[kv_heads, tokens, head_dim]`.

        Parameters
        ----------
        device : records are decoded on it, by triton; None: by the CPU, as those without a profile always are.

        Raises
        ------
        DamagedError : a record that does not fit its shape, its profile or its base.
        """
        parsed = [(self._parsed(item), item) for item in items]
        together: dict[tuple[bool, bytes, str], list[int]] = {}
        for number, (coded, item) in enumerate(parsed):
            transformed = coded.predictors[0] is Predictor.TRANSFORM
            together.setdefault((transformed, coded.profile, item.dtype), []).append(number)
        out: dict[int, LayerKV] = {}
        for (transformed, digest, _), numbers in together.items():
            some = [parsed[number] for number in numbers]
            made = (
                self._transformed(profiles(digest), layer, some, device)
                if transformed
                else [cachegen.unpack(coded, item.shape, item.dtype) for coded, item in some]
            )
            out.update(zip(numbers, made, strict=True))
        return [out[number] for number in range(len(items))]

    def decode_layers(self, items: Sequence[Encoded], profiles: Profiles = no_profiles) -> list[LayerKV]:
        """Keys and values of all layers of a chunk, in main memory: views `[kv_heads, tokens, head_dim]`.

        Raises
        ------
        DamagedError : as `decode`.
        """
        parsed = [(self._parsed(item), item) for item in items]
        alike = {(coded.predictors, coded.profile, item.dtype, item.shape[1]) for coded, item in parsed}
        if len(alike) != 1 or parsed[0][0].predictors != transform.BOTH:
            return [self.decode([item], layer, profiles)[0] for layer, item in enumerate(items)]
        profile, layers = profiles(parsed[0][0].profile), range(len(items))
        _check_fit(profile, layers, items)
        sides = transform.decode_layers(profile, layers, self.level, [[one] for one in parsed])
        return [heads_of(own, item.shape) for own, item in zip(sides, items, strict=True)]

    def base_of(self, payload: Payload) -> str | None:
        """The level whose record is needed too."""
        base = base_of(payload)
        return NESTED[base - 1] if base else None

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        """The error of K and that of V, RMS of the difference over RMS, as the record states them."""
        return Coded.parse(payload).errors

    def _parsed(self, item: Encoded) -> Coded:
        coded = Coded.parse(item.payload)
        if (coded.level, coded.tokens) != (NESTED.index(self.level) + 1, item.shape[1]):
            raise DamagedError("a compressed record of another level or length")
        return coded

    def _transformed(
        self, profile: Profile, layer: int, items: Sequence[tuple[Coded, Encoded]], device: torch.device | None
    ) -> list[LayerKV]:
        _check_fit(profile, [layer], [item for _, item in items])
        on = functools.partial(DeviceNumbers.of, device=device) if device is not None else None
        sides = transform.decode(profile, layer, self.level, items, on)
        tokens = [coded.tokens for coded, _ in items]
        each = sides.split_with_sizes(tokens, 1)
        return [heads_of(own, item.shape) for own, (_, item) in zip(each, items, strict=True)]


def _check_fit(profile: Profile, layers: Sequence[int], items: Sequence[Encoded]) -> None:
    """Refuse records that are wider than the profile, or layers that it has not: each is cut out of its channels."""
    widest = channels_of([item.shape for item in items])
    if widest > profile.layout.channels or not 0 <= min(layers) <= max(layers) < profile.layers:
        raise DamagedError("a codec profile of another model")
