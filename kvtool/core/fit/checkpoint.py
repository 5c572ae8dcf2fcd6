"""Where an interrupted fit goes on: a file beside the store's records, under a digest of what is being fitted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtool.core.cache.layout import atomic_write
from kvtool.core.cache.store import Store

_DIGEST_BYTES = 32
_ROUND = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Keeps the training's state between runs.

    Attributes
    ----------
    key : digest of all that the result depends on; another fit's checkpoint is not read.
    """

    store: Store
    key: bytes

    @classmethod
    def of(cls, store: Store, *settings: Any) -> Checkpoint:
        """Name the checkpoint of a fit with these settings (JSON values)."""
        return cls(store, hashlib.blake2b(json.dumps(settings).encode(), digest_size=_DIGEST_BYTES).digest())

    def load(self) -> tuple[int, bytes] | None:
        """Read how many rounds are done, and the state after them; None where no sound one of this fit is kept."""
        try:
            data = self._path().read_bytes()
        except OSError:
            return None
        digest, rest = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if digest != self._digest([rest]) or len(rest) < _ROUND.size:
            return None
        return _ROUND.unpack_from(rest)[0], rest[_ROUND.size :]

    def save(self, rounds: int, state: bytes) -> None:
        """Replace the checkpoint. Raises NoSpaceError."""
        head = _ROUND.pack(rounds)
        atomic_write(self._path(), self._digest([head, state]) + head + state)

    def drop(self) -> None:
        """Forget the checkpoint."""
        with contextlib.suppress(OSError):
            self._path().unlink(missing_ok=True)

    def _path(self) -> Any:
        return self.store.side_file("fit/lead-in.checkpoint")

    def _digest(self, parts: Sequence[bytes]) -> bytes:
        state = hashlib.blake2b(self.key, digest_size=_DIGEST_BYTES)
        for part in parts:
            state.update(part)
        return state.digest()
