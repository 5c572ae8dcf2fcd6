"""LMCache serde: KV in LMCache's L2 at levels 1 to 4 of kvtool's codec (`kvtool help lmcache`).

A serde turns a chunk of keys and values into bytes and back (`lmcache.v1.distributed.serde`). LMCache's keys have their
positions, the profile's have none, and LMCache does not say where in its prompt a chunk was. So the encoder finds the
position at which un-rotated keys are nearest to the profile's means, and stores it: a wrong one costs bytes, not
accuracy.

LMCache 0.5.6 loads an object only if it is as long as `estimate_serialized_size` says. So each chunk takes the same
number of bytes, at the finest level that fits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvtool.core.cache.store import Store
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.levels import LEVELS, NESTED
from kvtool.core.codec.profile import Profile
from kvtool.core.errors import DamagedError, KvtoolError, UsageError
from kvtool.core.session.identity import ProfileCache

BITS = 2.75  # a number: level 2, on the models that were measured
_LEAST = 0.8  # of a level's usual size: with fewer bits it is not tried
_MAGIC = b"kvl\x01"
# xxh3-64 of the rest up to the zeros; magic, level, layers, position of the first token, bytes after this header. Then
# that token f32[2, layers, channels], u32[layers] bytes of each record, the records (`kvtool help codec`), and zeros.
_HEADER = struct.Struct("<Q4sHHII")
_POSITIONS = 1 << 18  # that a chunk may begin at


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding by halves: `frequencies` (radians a position) of pairs of a head's first numbers."""

    head_dim: int
    frequencies: torch.Tensor
    scaling: float

    def pairs(self, keys: torch.Tensor) -> torch.Tensor:
        """View keys `[…, channels]` as complex numbers `[…, heads, pairs]`."""
        low, high = keys.unflatten(-1, (-1, self.head_dim))[..., : 2 * len(self.frequencies)].chunk(2, -1)
        return torch.complex(low, high)

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """Return complex128 `[positions, pairs]`, by which keys are multiplied."""
        angles = positions[:, None].double() * self.frequencies
        return torch.polar(torch.full_like(angles, self.scaling), angles)

    def multiplied(self, keys: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Multiply float32 keys `[layers, tokens, channels]` by turns `[tokens, pairs]`."""
        moved = self.pairs(keys) * turns[:, None].to(torch.complex64)
        rest = keys.unflatten(-1, (-1, self.head_dim))[..., 2 * len(self.frequencies) :]
        return torch.cat([moved.real, moved.imag, rest], -1).flatten(-2)

    def first_position(self, keys: torch.Tensor, means: torch.Tensor, step: int) -> int:
        """Find the multiple of `step` from which un-rotated keys are nearest to their means `[layers, channels]`.

        A rotation keeps the keys' length, so the nearest are those of the largest product.
        """
        summed = (self.pairs(keys) * self.turns(-torch.arange(keys.shape[1]))[:, None]).sum(1)
        likeness = (summed * self.pairs(means).conj()).sum((0, 1))
        starts = torch.arange(0, _POSITIONS, step)
        return int(starts[(self.turns(-starts) @ likeness).real.argmax()])


class LevelSerde:
    """Serializer and deserializer of LMCache's chunks `[2, layers, tokens, channels]`, by a store's profile.

    Raises UsageError for a number of `bits` of no level, and KvtoolError for a profile without a rotation of keys.
    """

    def __init__(self, profile: Profile, bits: float = BITS) -> None:
        self._levels = [level for level in NESTED if LEVELS[level].bits * _LEAST <= bits]
        if not self._levels or bits > 16:
            raise UsageError(f"the serde has {bits:g} bits a number", "give it between 0.5 and 16")
        rope = profile.about.get("rope")
        if rope is None:
            hint = "`kvtool compress --fit`, if all heads of the model rotate by halves, by one RoPE"
            raise KvtoolError("the codec profile does not say how the model's keys are rotated", hint)
        self._profile, self._bits, self._step = profile, bits, 1  # tokens of the longest chunk so far
        self._rope = Rope(rope["head_dim"], torch.tensor(rope["frequencies"], dtype=torch.float64), rope["scaling"])

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        shape = torch.Size(*layout_desc.shapes)
        return _HEADER.size + 4 * self._layers_of(shape) + ceil(shape.numel() * self._bits / 8)

    def serialize(self, src: Any, dst: Any, key: object) -> int:
        """Encode at the finest level that fits. Raises KvtoolError if none does; then LMCache stores nothing."""
        sides, out = src.tensor.float().cpu(), dst.tensor.flatten()
        layers = self._layers_of(sides.shape)
        first = sides[:, :, :1].numpy().tobytes()  # all tokens attend to a prompt's first one: its error costs most
        self._step = max(self._step, sides.shape[2])
        start = self._rope.first_position(sides[0], self._profile.means[:, 0], self._step)
        plain = self._rope.multiplied(sides[0], self._rope.turns(start + torch.arange(sides.shape[2])).reciprocal())
        kvs = [(keys[None], values[None]) for keys, values in zip(plain, sides[1], strict=True)]
        for level in self._levels:
            records = [b"".join(parts) for parts in CODECS[level].encode_layers(kvs, self._profile)]
            body = first + struct.pack(f"<{layers}I", *map(len, records)) + b"".join(records)
            if _HEADER.size + len(body) <= len(out):
                rest = _HEADER.pack(0, _MAGIC, int(level), layers, start, len(body))[8:] + body
                # Zeros to the end: the buffer may hold what others computed.
                whole = (struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest).ljust(len(out), b"\0")
                out.copy_(torch.frombuffer(bytearray(whole), dtype=torch.uint8))
                return len(out)
        raise KvtoolError(f"a chunk takes more than {self._bits:g} bits a number", "give the serde more bits")

    def deserialize(self, src: Any, dst: Any, key: object) -> None:
        """Decode bytes into keys and values. Raises DamagedError: other bytes than `serialize` wrote for this shape."""
        out, data = dst.tensor, src.tensor.flatten().cpu().numpy().tobytes()
        digest, magic, level, layers, start, size = _HEADER.unpack_from(data.ljust(_HEADER.size, b"\0"))
        body = data[_HEADER.size : _HEADER.size + size]
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(data[8 : _HEADER.size + size]) != digest:
            raise DamagedError("a chunk of LMCache that is damaged, or that kvtool did not encode")
        if layers != self._layers_of(out.shape) or size < layers * (8 * out.shape[3] + 4) or str(level) not in NESTED:
            raise DamagedError("a chunk of LMCache of another shape")
        exact, (_, _, tokens, channels) = 8 * layers * out.shape[3], out.shape  # bytes of the first token
        ends = accumulate(struct.unpack_from(f"<{layers}I", body, exact), initial=exact + 4 * layers)
        items = [Encoded(body[at:end], (1, tokens, channels), "float32") for at, end in pairwise(ends)]
        kvs = CODECS[str(level)].decode_layers(items, self._own)
        there = self._rope.turns(torch.arange(start, start + tokens))
        keys = self._rope.multiplied(torch.stack([keys[0] for keys, _ in kvs]), there)
        out.copy_(torch.stack([keys, torch.stack([values[0] for _, values in kvs])]))
        out[:, :, :1] = torch.frombuffer(bytearray(body[:exact]), dtype=torch.float32).view(2, layers, 1, channels)

    def _layers_of(self, shape: torch.Size) -> int:
        profile = self._profile
        if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (2, profile.layers, profile.layout.channels):
            raise KvtoolError(
                f"KV of shape {[*shape]}; the profile: {profile.layers} layers of {profile.layout.channels} channels",
                "take a store of the served model; its heads must not be split among GPUs",
            )
        return int(shape[1])

    def _own(self, digest: bytes) -> Profile:
        if digest != self._profile.digest:
            raise DamagedError("a chunk of LMCache that was encoded with another codec profile")
        return self._profile


def register(name: str = "kvtool") -> None:
    """Register the serde with LMCache in this process, once.

    Its options, in the `serde` of an L2 adapter: `store` (a store with a profile), `bits`, `max_workers` (threads).
    """
    from lmcache.v1.distributed.serde import AsyncSerdeProcessor, get_registered_serde_types, register_serde_factory

    def make(options: dict[str, Any]) -> object:
        with Store.open(Path(options["store"])) as store:
            profile = ProfileCache(store).current()
        if profile is None:
            raise KvtoolError(f"the store at {options['store']} has no codec profile", "`kvtool compress` fits one")
        serde = LevelSerde(profile, float(options.get("bits", BITS)))
        return AsyncSerdeProcessor(serde, serde, max_workers=int(options.get("max_workers", 1)))

    if name not in get_registered_serde_types():
        register_serde_factory(name, make)


if __name__ == "__main__":
    from lmcache.cli.main import main

    register()
    main()
