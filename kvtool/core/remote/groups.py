"""Values of a shared tier that belong together, asked for ahead and taken whole or not at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtool.core.cache.backend import Wanted
from kvtool.core.remote import values
from kvtool.core.remote.arrivals import Arrivals
from kvtool.core.remote.blobs import Readable

_AHEAD = 4  # groups that are asked for before the first is there


@dataclass(frozen=True, slots=True)
class Group:
    """A group of values that are fetched all or not at all.

    Attributes
    ----------
    key : of the file or chunk, in hex; what : the same for people.
    most : bytes of all values together.
    levels : of a chunk's records, in the order of `wanted`; `replaces` : they replace the stored ones.
    """

    key: str
    what: str
    wanted: Sequence[Wanted]
    most: int
    levels: tuple[str, ...] = ()
    replaces: bool = False


class Groups:
    """Fetches groups over one stream.

    Parameters
    ----------
    timeout : seconds to wait for a value.
    damaged : told of what is missing, damaged or larger than it may be, and why; its group is left out.
    """

    def __init__(self, blobs: Readable, timeout: float, damaged: Callable[[str, str], None]) -> None:
        self._blobs, self._timeout, self._damaged = blobs, timeout, damaged

    def fetch(self, groups: Iterable[Group], at_once: int = 1) -> Iterator[tuple[Group, list[bytes]]]:
        """Groups whose values all came, each sound in itself. Raises RemoteError.

        Parameters
        ----------
        at_once : so many groups are asked for together: of those that stand side by side one request is made.
        """
        arrivals = Arrivals(self._blobs)
        waiting, left = deque[Group](), iter(groups)
        try:
            while some := list(islice(left, at_once)):
                arrivals.ask([wanted for group in some for wanted in group.wanted])
                waiting.extend(some)
                while len(waiting) > _AHEAD * at_once:
                    yield from self._taken(arrivals, waiting.popleft())
            for group in waiting:
                yield from self._taken(arrivals, group)
        finally:
            arrivals.close()

    def _taken(self, arrivals: Arrivals, group: Group) -> Iterator[tuple[Group, list[bytes]]]:
        """All of them are taken, since they are on their way; nothing is held of a group that is not whole."""
        whole: list[bytes] = []
        left, why = group.most, ""
        for wanted in group.wanted:
            value = arrivals.take(self._timeout).value
            left -= len(value or b"")
            why = why or _trouble(wanted, value, left)
            if value is not None and not why:
                whole.append(value)
            elif why:
                whole.clear()
        if why:
            self._damaged(group.what, why)
        else:
            yield group, whole


def _trouble(wanted: Wanted, value: bytes | None, left: int) -> str:
    what = f"{wanted.name} in {wanted.pack}" if wanted.pack else wanted.name
    if value is None:
        return f"{what} is missing there"
    if left < 0:
        return f"{what} is larger than the catalogue says"
    return "" if values.is_sound(wanted.name, value) else f"{what} is damaged there"


def single(key: str, what: str, wanted: Wanted) -> Group:
    """A group of one value."""
    return Group(key, what, [wanted], wanted.most)
