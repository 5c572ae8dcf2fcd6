"""Codec plugins: codecs of other packages, checked as they encode and decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from typing import cast

import torch

from kvtool.core.codec.base import (
    NAMES,
    Codec,
    Device,
    Encoded,
    LayerKV,
    Payload,
    Profiles,
    SelfContained,
    no_profiles,
    shape_of_layer,
)
from kvtool.core.codec.levels import Level
from kvtool.core.codec.profile import Profile
from kvtool.core.common.plugins import Plugin, PluginError
from kvtool.core.errors import DamagedError


class PluginCodec(SelfContained):
    """A plugin's codec, each of whose records is decoded at once.

    A lossless level has to give the same bits back, a lossy one the same shape; else encoding raises PluginError. Any
    error while a record is decoded counts as a damaged record, which is computed again.
    """

    def __init__(self, level: Level, plugin: Plugin) -> None:
        super().__init__(level.name)
        self._level, self._plugin = level, plugin

    @cached_property
    def _codec(self) -> Codec:
        module, _, kind = self._level.codec.partition(":")
        try:
            return cast(Codec, getattr(import_module(module), kind)(self._level.name))
        except Exception as error:
            raise self._plugin.broken(error) from error

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0, profile: Profile | None = None
    ) -> Sequence[Payload]:
        """Encode one layer, and check what it is decoded to. Raises PluginError."""
        codec = self._codec
        try:
            parts = [bytes(part) for part in codec.encode(keys, values, layer)]
        except Exception as error:
            raise self._plugin.broken(error) from error
        self._check((keys, values), b"".join(parts), layer)
        return parts

    def decode(
        self, items: Sequence[Encoded], layer: int = 0, profiles: Profiles = no_profiles, device: Device = None
    ) -> list[LayerKV]:
        with self._damage():
            made = self._codec.decode(items, layer)
            if [(shape_of_layer(kv), NAMES[kv[0].dtype]) for kv in made] != [
                (item.shape, item.dtype) for item in items
            ]:
                raise ValueError("it gives back another shape")
            return [(keys, values) for keys, values in made]

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        if self._level.lossless:
            return 0.0, 0.0
        with self._damage():
            of_keys, of_values = self._codec.stated_error(payload)
            return float(of_keys), float(of_values)

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Raise DamagedError for any error of the codec."""
        try:
            yield
        except DamagedError:
            raise
        except Exception as error:
            broken = error if isinstance(error, PluginError) else self._plugin.broken(error)
            raise DamagedError(broken.message, broken.hint) from error

    def _check(self, kv: LayerKV, payload: bytes, layer: int) -> None:
        item = Encoded(bytearray(payload), shape_of_layer(kv), NAMES[kv[0].dtype])
        try:
            (made,) = self.decode([item], layer)
        except DamagedError as error:
            raise self._plugin.broken(f"it cannot read what it wrote: {error.message}") from error
        if self._level.lossless and not all(map(_same_bits, made, kv)):
            raise self._plugin.broken("it is not lossless: it gives back other numbers than it was given")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits, since a NaN equals nothing."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
