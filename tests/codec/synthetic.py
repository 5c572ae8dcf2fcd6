"""KV of models that do not exist: correlated channels, few directions that carry much, sharp peaks and long tails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvtool.core.codec import transform
from kvtool.core.codec import transform as encoder
from kvtool.core.codec.backend import Backend, CpuBackend
from kvtool.core.codec.base import NAMES, Encoded, Payload, Profiles
from kvtool.core.codec.cachegen import CacheGen
from kvtool.core.codec.fit import fit_profile
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.record import Record
from kvtool.core.errors import DamagedError

STEP = 0.3
LAYERS = 3
KV = tuple[torch.Tensor, torch.Tensor]


class Model:
    """Gives keys and values at any layer.

    Parameters
    ----------
    rank : directions that carry anything; None: all, each less than the one before.
    """

    def __init__(self, heads: int = 2, dim: int = 24, rank: int | None = None, seed: int = 0) -> None:
        self.heads, self.dim, self.channels = heads, dim, heads * dim
        dice = np.random.default_rng(seed)
        shape = (LAYERS, 2, self.channels, self.channels)
        spectrum = 3 * 0.93 ** np.arange(self.channels)
        spectrum[self.channels if rank is None else rank :] = 0
        turned = np.linalg.qr(dice.normal(size=shape))[0]
        self.mixing = spectrum[:, None] * turned
        self.means = dice.normal(size=(LAYERS, 2, 1, self.channels))
        roots = dice.normal(size=(2, LAYERS, self.channels, self.channels)) / np.sqrt(self.channels)
        self.sensitivity = torch.from_numpy(roots @ roots.swapaxes(2, 3)).float()

    def sides(self, layer: int, tokens: int, seed: int = 0) -> torch.Tensor:
        """float32 `[2, tokens, C]`."""
        latent = np.random.default_rng((seed, layer)).laplace(size=(2, tokens, self.channels)) / np.sqrt(2)
        return torch.from_numpy(latent @ self.mixing[layer] + self.means[layer]).float()

    def kv(self, layer: int, tokens: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> KV:
        return self.heads_of(self.sides(layer, tokens, seed), dtype)

    def heads_of(self, sides: torch.Tensor, dtype: torch.dtype = torch.float32) -> KV:
        keys, values = sides.view(2, -1, self.heads, self.dim).transpose(1, 2).to(dtype)
        return keys, values


@cache
def model(heads: int = 2, dim: int = 24, rank: int | None = None) -> Model:
    return Model(heads, dim, rank)


def fitted(of: Model, groups: int = 1, tokens: int = 400, step: float = STEP) -> Profile:
    return fit_profile(lambda layer: of.sides(layer, tokens), of.sensitivity, groups, {"model": "synthetic"}, step)


@cache
def profile(heads: int = 2, dim: int = 24, rank: int | None = None, groups: int = 1) -> Profile:
    return fitted(model(heads, dim, rank), groups)


def shelf(*profiles: Profile | None) -> Profiles:
    there = {one.digest: one for one in profiles if one is not None}

    def found(digest: bytes) -> Profile:
        if digest not in there:
            raise DamagedError("no such profile")
        return there[digest]

    return found


def item_of(payload: bytes, like: torch.Tensor, base: Encoded | None = None) -> Encoded:
    heads, tokens, dim = like.shape
    return Encoded(payload, (heads, tokens, dim), NAMES[like.dtype], base)


def encode_nested(
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    levels: Sequence[str],
    profile: Profile | None = None,
    bases: Mapping[str, Payload] = MappingProxyType({}),
) -> dict[str, list[Payload]]:
    """One layer's records, as parts; without a profile those of the paper's scheme, for a layer of `LAYERS`."""
    if profile is None:
        return {level: [*CacheGen(f"cachegen-{level}")._encoded((keys, values), layer, LAYERS)] for level in levels}
    below = {level: [base] for level, base in bases.items()}
    made = encoder.encode_nested(profile, [layer], [(keys, values)], levels, below)
    return {level: [*records[0]] for level, records in made.items()}


def encoded(
    keys: torch.Tensor, values: torch.Tensor, levels: Sequence[str], profile: Profile | None = None, layer: int = 0
) -> dict[str, Encoded]:
    """Records of some levels, each with those that it refines."""
    made = encode_nested(keys, values, layer, levels, profile)
    out: dict[str, Encoded] = {}
    for level in sorted(levels, reverse=True):  # coarsest first
        payload = b"".join(made[level])
        base = Record.parse(payload).base
        out[level] = item_of(payload, keys, out[str(base)] if base else None)
    return out


def changed(item: Encoded, **fields: Any) -> Encoded:
    """A record whose payload has other values of some fields of `Record`."""
    return replace(item, payload=b"".join(replace(Record.parse(item.payload), **fields).pack()))


def numbers_of(
    items: Sequence[Encoded], of: Profile, backend: Backend | None = None, layer: int = 0
) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """The whole numbers that records hold, one record after the other."""
    ends = list(accumulate(item.shape[1] for item in items))
    numbers = torch.zeros((ends[-1], of.layout.stride), dtype=torch.int16)
    records = [(Record.parse(item.payload), item) for item in items]
    transform.fill(of, [(layer, records, [0, *ends[:-1]])], numbers, backend or CpuBackend())
    return numbers.numpy()


def assert_same_profile(one: Profile, other: Profile) -> None:
    assert (one.digest, one.about) == (other.digest, other.about)
    assert torch.equal(one.means, other.means)
    assert torch.equal(one.basis, other.basis)
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("active", "ids", "fine_ids"))
    assert np.array_equal(one.tables.frequencies, other.tables.frequencies)


def relative(made: torch.Tensor, exact: torch.Tensor) -> float:
    wrong = (made.double() - exact.double()).square().mean().sqrt()
    return float(wrong / exact.double().square().mean().sqrt().clamp_min(1e-30))
