"""A part of the files that a walk finds, for runs side by side that know nothing of each other."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.core.corpus.walk import Walked

_FORM = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")


def complaint(value: str) -> str:
    """Return the error in `I/N`, the I-th of N parts counted from 1; empty if it is valid."""
    found = _FORM.fullmatch(value)
    return "" if found and int(found[1]) <= int(found[2]) else "is no part: I/N with 1 <= I <= N, such as 2/8"


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the files, one of `parts`; `index` counts from 0.

    A file's part is a digest of its path. So parts are disjoint and complete even if the folder changes between two
    runs, and a file stays in its part when others are added or removed. Parts are of about equal numbers of files, not
    of bytes.
    """

    index: int
    parts: int

    @classmethod
    def read(cls, value: str) -> Shard:
        """Read `I/N`, of which `complaint` has nothing to say."""
        index, _, parts = value.partition("/")
        return cls(int(index) - 1, int(parts))

    def holds(self, path: str) -> bool:
        """Return True if the file of this name is in this part."""
        digest = hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.parts == self.index

    def of(self, walked: Walked) -> Walked:
        """The part's own files, failures and skipped ones; what was said of given paths stays."""
        return replace(
            walked,
            files=[file for file in walked.files if self.holds(file.name)],
            failures=[failure for failure in walked.failures if self.holds(failure.path)],
            skipped=[skipped for skipped in walked.skipped if self.holds(skipped.path)],
        )
