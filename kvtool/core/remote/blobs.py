"""Protocol of a shared store's backend: named values. A backend is one file with one class and one line in `urls`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from kvtool.core.cache.backend import Wanted

TIMEOUT = 5.0  # seconds for a value, after which a tier counts as gone
LEASES = {"push": 600.0, "sweep": 60.0}  # seconds for which a name that is held stands, by what it begins with
AHEAD = 3600.0  # seconds: two clocks may differ by less


class Reader(Protocol):
    """Asks for blobs ahead and takes them as they come, in the order asked: the link is never idle in between."""

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """Ask for some more; returns before they are there. Raises RemoteError."""
        ...

    def take(self) -> bytes | None:
        """The next one asked for, None where there is none of its name, empty where it is too large or no value at all,
        and as much as there is of a part. Raises RemoteError; the reader is of no more use then."""
        ...

    def close(self) -> None:
        """Stop; what was asked for and not taken is given up."""
        ...


class ReadInTurn:
    """A reader for a place that cannot be asked ahead: a value is read when it is taken.

    Parameters
    ----------
    read : gives what is wanted, as `Reader.take` does.
    """

    def __init__(self, read: Callable[[Wanted], bytes | None]) -> None:
        self._read, self._asked = read, deque[Wanted]()

    def ask(self, wanted: Sequence[Wanted]) -> None:
        """See Reader."""
        self._asked.extend(wanted)

    def take(self) -> bytes | None:
        """See Reader."""
        return self._read(self._asked.popleft())

    def close(self) -> None:
        """See Reader."""
        self._asked.clear()


class Readable(Protocol):
    """Protocol of a source that a pull reads from: a shared store, or a pack.

    Attributes
    ----------
    url : of the source, as it is shown to people.
    """

    url: str

    def reader(self) -> Reader:
        """A stream of values of its own. Raises RemoteError."""
        ...


class Blobs(Protocol):
    """Named values of a shared tier. Names are ASCII, with `/` between their parts. Methods raise RemoteError.

    A value once put is never changed, only put again with the same bytes or deleted; `head` alone is swapped. So a
    reader sees either all of a push or nothing of it. What a value is worth its digest says, not the tier.

    Attributes
    ----------
    url : as people are shown it.
    """

    url: str

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Values, None where there is none; empty where one is larger than its name allows, or no value at all."""
        ...

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return each value's size in bytes; 0 if it is missing or empty (kvtool never stores an empty value)."""
        ...

    def put(self, values: Mapping[str, bytes]) -> None:
        """Keep values, each whole or not at all."""
        ...

    def settle(self) -> None:
        """Make what was put durable, as far as the tier can."""
        ...

    def swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace a value if it is still `before` (None: there is none). False: it is another by now."""
        ...

    def names(self, below: str = "") -> Iterator[str]:
        """List the names that begin so, in no order."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Forget values; those that are not there are no error."""
        ...

    def hold(self, name: str) -> None:
        """Let everybody see that `name` (a key of `LEASES`, `-`, an id) is at work, until its time is over; again to
        renew it. It is no value: `names` does not list it."""
        ...

    def held(self) -> set[str]:
        """Return the names with a valid lease by the shared store's own clock; the caller has just renewed its own."""
        ...

    def release(self, name: str) -> None:
        """Hold it no longer."""
        ...

    def reader(self) -> Reader:
        """A stream of values of its own."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def seconds_held(name: str) -> float:
    """Return the seconds that a lease of this name lasts. Raises KeyError for another name."""
    return LEASES[name.partition("-")[0]]


def stands(name: str, renewed: float, now: float) -> bool:
    """Return True if a lease is valid that was last renewed at a time. A time far in the future does not count: the
    clock was wrong then, and the lease would not end before that time. Raises KeyError for another name."""
    return -AHEAD < now - renewed < seconds_held(name)
