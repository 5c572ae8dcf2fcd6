"""A tier as a push sees it that changes nothing: what is read is the tier's, what is written goes nowhere.

But the head, and the catalogues: what they say decides on what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtool.core.remote.blobs import Blobs, Reader


class Rehearsal:
    """See Blobs."""

    def __init__(self, blobs: Blobs) -> None:
        self.url = blobs.url
        self._blobs = blobs
        self._written: dict[str, bytes] = {}

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See Blobs."""
        values = self._blobs.get(names)
        return [self._written.get(name, value) for name, value in zip(names, values, strict=True)]

    def sizes(self, names: Sequence[str]) -> list[int]:
        """See Blobs."""
        return self._blobs.sizes(names)

    def names(self, below: str = "") -> Iterator[str]:
        """See Blobs."""
        return self._blobs.names(below)

    def reader(self) -> Reader:
        """See Blobs."""
        return self._blobs.reader()

    def put(self, values: Mapping[str, bytes]) -> None:
        """Keep catalogues in mind, and nothing else; see Blobs."""
        self._written |= {name: value for name, value in values.items() if name.startswith(("catalogue/", "shard/"))}

    def settle(self) -> None:
        """Do nothing; see Blobs."""

    def swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Act as if it had been swapped; see Blobs."""
        self._written[name] = after
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Do nothing; see Blobs."""

    def hold(self, name: str) -> None:
        """Do nothing; see Blobs."""

    def held(self) -> set[str]:
        """Nothing is held: who changes nothing is in nobody's way."""
        return set()

    def release(self, name: str) -> None:
        """Do nothing; see Blobs."""

    def close(self) -> None:
        """Left to whoever opened the tier."""
