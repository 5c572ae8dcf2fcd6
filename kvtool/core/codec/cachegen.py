"""Levels `1` to `4`: small records with a stated loss (CacheGen, with what was better here: kvtool/docs/codec.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvtool.core.codec import analysis, plain, transform
from kvtool.core.codec.base import Encoded, LayerKV, Payload, Profiles, Shape, no_profiles, shape_of_layer, side_shapes
from kvtool.core.codec.layout import channels_of, wide_sides
from kvtool.core.codec.nested import NESTED
from kvtool.core.codec.on_device import DeviceNumbers
from kvtool.core.codec.payload import Coded, Predictor, base_of
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.raw import DTYPES
from kvtool.core.errors import DamagedError, KvtoolError

PREDICTORS = {"mean": Predictor.MEAN, "anchor": Predictor.ANCHOR}
_PLAIN = tuple(PREDICTORS.values())
_LEAST_SPREAD = 2**-10  # of the RMS: what means in bfloat16 leave over must not be hundreds of steps
_LAYERS = 3  # of a model whose layers nobody knows: only the paper's thirds need them

_NO_BASES: Mapping[str, Any] = MappingProxyType({})


class CacheGen:
    """One lossy level. With a profile its transform serves; without one the cheaper of the plain predictors."""

    def __init__(self, level: str) -> None:
        self.level = level

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0, profile: Profile | None = None
    ) -> list[Payload]:
        """Encode one layer's keys and values, each `[kv_heads, tokens, head_dim]`, as a record that stands alone."""
        return encode_nested(keys, values, layer, [self.level], profile)[self.level]

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> list[list[Payload]]:
        """Encode all layers of a chunk together."""
        return encode_layers(range(len(kvs)), kvs, [self.level], profile, layers=len(kvs))[self.level]

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
        device : transformed records are decoded on it, by triton; None: by the CPU, as plain ones always are.

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
                else [_plain_sides(coded, item) for coded, item in some]
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
        return [_cut(own, item.shape) for own, item in zip(sides, items, strict=True)]

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
        return [_cut(own, item.shape) for own, (_, item) in zip(each, items, strict=True)]


def _check_fit(profile: Profile, layers: Sequence[int], items: Sequence[Encoded]) -> None:
    """Refuse records that are wider than the profile, or layers that it has not: each is cut out of its channels."""
    widest = channels_of([item.shape for item in items])
    if widest > profile.layout.channels or not 0 <= min(layers) <= max(layers) < profile.layers:
        raise DamagedError("a codec profile of another model")


def _cut(sides: torch.Tensor, shape: Shape) -> LayerKV:
    """Keys and values of a shape, as views of decoded sides `[2, tokens, channels]`."""
    keys, values = (
        side[:, : heads * head_dim].unflatten(1, (heads, head_dim)).transpose(0, 1)
        for side, (heads, _, head_dim) in zip(sides, side_shapes(shape), strict=True)
    )
    return keys, values


def encode_nested(
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    levels: Sequence[str],
    profile: Profile | None = None,
    *,
    bases: Mapping[str, Payload] = _NO_BASES,
    predictor: str = "auto",
    layers: int = _LAYERS,
) -> dict[str, list[Payload]]:
    """Encode one layer at several nested levels: `encode_layers` of one."""
    below = {level: [base] for level, base in bases.items()}
    made = encode_layers([layer], [(keys, values)], levels, profile, bases=below, predictor=predictor, layers=layers)
    return {level: records[0] for level, records in made.items()}


def encode_layers(
    numbers: Sequence[int],
    kvs: Sequence[LayerKV],
    levels: Sequence[str],
    profile: Profile | None = None,
    *,
    bases: Mapping[str, Sequence[Payload]] = _NO_BASES,
    predictor: str = "auto",
    layers: int = _LAYERS,
) -> dict[str, list[list[Payload]]]:
    """Encode layers of one chunk at several nested levels.

    With a profile a level refines the next coarser one where that is among `levels` or `bases`, so that both together
    take hardly more than the finer alone.

    Parameters
    ----------
    numbers, kvs : which layers, and keys and values of each, `[kv_heads, tokens, head_dim]`.
    bases : records of these layers at coarser levels that are stored already, made with this profile.
    predictor : `auto`, `mean` or `anchor`: without a profile; `auto` takes the cheaper one for each side.
    layers : how many the model has.

    Returns
    -------
    For each level the parts of each layer's record.
    """
    if profile is not None and predictor == "auto":
        below = {level: [[record] for record in records] for level, records in bases.items()}
        return analysis.encode(profile, numbers, kvs, levels, below)
    made: dict[str, list[list[Payload]]] = {level: [] for level in levels}
    for layer, kv in zip(numbers, kvs, strict=True):
        sides = wide_sides(kv, channels_of([shape_of_layer(kv)])).float().cpu()
        if sides.numel() and not all(torch.isfinite(end) for end in torch.aminmax(sides)):
            raise KvtoolError("the KV holds numbers that are not finite", "keep it at the level raw or lossless")
        for level in levels:
            made[level].append(_plain(level, layer, layers, sides, predictor, kv[0].dtype).pack())
    return made


def _plain(level: str, layer: int, layers: int, sides: torch.Tensor, predictor: str, dtype: torch.dtype) -> Coded:
    wanted = _PLAIN if predictor == "auto" else (PREDICTORS[predictor],)
    number = NESTED.index(level) + 1
    chosen = []
    for side in sides.numpy():
        spread = max(_rms(side - side.mean(0)), _LEAST_SPREAD * _rms(side))
        # At one step their errors are alike, so the bits decide.
        step = plain.step_of(wanted[0], number, layer, layers, spread)
        made = [plain.quantise(predicted, side, step) for predicted in wanted]
        chosen.append(min(made, key=lambda one: one.bits))
    restored = torch.stack([torch.from_numpy(quantised.values) for quantised in chosen]).to(dtype).float()
    return plain.pack((chosen[0], chosen[1]), number, sides.shape[1], _errors(sides, restored))


def _plain_sides(coded: Coded, item: Encoded) -> LayerKV:
    made = plain.unpack(coded, channels_of([item.shape]))
    return _cut(torch.stack([torch.from_numpy(side).to(DTYPES[item.dtype]) for side in made]), item.shape)


def _rms(side: plain.F32) -> float:
    return float(np.sqrt(np.square(side).mean())) if side.size else 0.0


def _errors(sides: torch.Tensor, made: torch.Tensor) -> tuple[float, float]:
    """RMS of the difference over RMS, of K and of V, rounded up to float32."""
    wrong = made.sub(sides).square_().mean((1, 2)).sqrt()
    size = sides.square().mean((1, 2)).sqrt().clamp_min(1e-30)
    key, value = (np.nextafter(np.float32(error), np.float32(np.inf)) for error in (wrong / size).tolist())
    return float(key), float(value)
