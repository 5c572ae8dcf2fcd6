"""Protocol of a shared store's backend, and what a backend needs: readers, leases, the registry of URLs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.common.plugins import extra_line, found
from kvtool.core.common.urls import KINDS, SCHEME, for_people, is_url
from kvtool.core.errors import KvtoolError, UsageError

TIMEOUT = 5.0  # seconds for a value, after which a shared store counts as gone
LEASES = {"push": 600.0, "sweep": 60.0}  # seconds that a lease lasts, by what its name begins with
AHEAD = 3600.0  # seconds: two clocks may differ by less
LEAST_RATE = 1024  # bytes a second, on average, of an answer that takes longer than the timeout
MOST_NAMES = 10**7  # that a place lists; more would never end
MOST_BYTES = 2**30  # of any value
_MOST = {"head": 2**12, "catalogue": 2**28, "shard": 2**26, "meta": 2**24, "chunk": 2**24}  # by what a name begins with


def most_bytes(name: str) -> int:
    """Return the largest size in bytes that a value of this name may have."""
    return _MOST.get(name.partition("/")[0], MOST_BYTES)


class Readable(Protocol):
    """A source that a pull reads from: a shared store, or a pack. `url` is shown to people. It takes `at_once` fetches,
    each of `together` requests; a request for several near parts of a pack is of `joined` bytes at most."""

    url: str
    at_once: int
    together: int
    joined: int

    def fetch(self, requests: Sequence[BlobRequest]) -> Iterator[tuple[int, bytes | None]]:
        """Yield the number of a request and bytes of its value as they come, one value after the other: None if it is
        missing, nothing if it is too large or no value at all, fewer if a part is cut off. Raises RemoteError."""


class Blobs(Readable, Protocol):
    """Named values of a shared store. Names are ASCII, with `/` between their parts. Methods raise RemoteError.

    A value is never changed, only put again with the same bytes or deleted; only `head` is replaced. So a reader sees
    either all of a push or nothing of it. Digests protect the values, not the shared store."""

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Read values: None if one is missing, empty if one is larger than its name allows, or no value at all."""

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return each value's size in bytes; 0 if it is missing or empty (kvtool never stores an empty value)."""

    def put(self, values: Mapping[str, bytes]) -> None:
        """Store values, each whole or not at all."""

    def flush(self) -> None:
        """Make durable what was put, as far as the backend can."""

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace a value if it is still `before` (None: missing). False: another value is there by now."""

    def names(self, below: str = "") -> Iterator[str]:
        """List the names that begin so, in no order."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete values; missing ones are no error."""

    def hold(self, name: str) -> None:
        """Take or renew a lease, which all users of the store see until it expires. Its name is a key of `LEASES`, `-`
        and an id. A lease is no value: `names` does not list it."""

    def held(self) -> set[str]:
        """Return the names with a valid lease by the shared store's own clock; the caller has just renewed its own."""

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


class Backend:
    """A source that reads one value after the other, by `_read`, or that has its own `fetch`."""

    at_once, together, joined = 1, 1, 0

    def fetch(self, requests: Sequence[BlobRequest]) -> Iterator[tuple[int, bytes | None]]:
        return ((number, self._read(request)) for number, request in enumerate(requests))

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        found = dict(self.fetch([BlobRequest(name, most_bytes(name)) for name in names])) if names else {}
        return [found.get(number, b"") for number in range(len(names))]

    def _read(self, wanted: BlobRequest) -> bytes | None:
        raise NotImplementedError


class PrivateBlobs(Backend):
    """A store that nobody else uses: nothing has to be leased, deleted or synced."""

    def flush(self) -> None: ...

    def delete(self, names: Sequence[str]) -> None: ...

    def hold(self, name: str) -> None: ...

    def held(self) -> set[str]:
        return set()

    def release(self, name: str) -> None: ...

    def close(self) -> None:
        """Do nothing: the caller opened it."""


def seconds_held(name: str) -> float:
    """Raises KeyError for a name that is no lease's."""
    return LEASES[name.partition("-")[0]]


def leases_at(now: float, renewed: Mapping[str, float]) -> tuple[set[str], set[str]]:
    """Return the leases that are valid and those that are over, by their names and the times of their last renewal;
    other names are neither. A time far in the future counts as over: the clock was wrong then, and the lease would not
    end before that time."""
    leases = {name: at for name, at in renewed.items() if name.partition("-")[0] in LEASES}
    valid = {name for name, at in leases.items() if -AHEAD < now - at < seconds_held(name)}
    return valid, leases.keys() - valid


# ---- the backend of a URL ------------------------------------------------------------------------------------------

# The sign @ is before the URLs: after a URL it would look like the end of a password, which `scrubbed` hides
_SUCH_AS = "in a password write / @ ? # as %2F %40 %3F %23; such as redis://host:6379/0 or file:///mnt/shared/kv"

_PLUGINS = found("blobs", names=KINDS)


def open_blobs(url: str, timeout: float = TIMEOUT) -> Blobs:
    """Return the backend of a URL; no request is sent yet. Raises UsageError for a broken URL or an unknown kind,
    KvtoolError if a package is missing, PluginError if the plugin for such URLs cannot be used."""
    kind, mark, _ = url.partition("://")
    if not mark or not SCHEME.fullmatch(kind):
        hint = _SUCH_AS
        if not (is_url(url) or "@" in url or "\0" in url):  # else it is meant as a URL, with a password perhaps
            hint = f"a folder is named by {Path(url).absolute().as_uri()}; others are such as redis://host:6379/0"
        raise UsageError(f"'{for_people(url)}' is no URL of a shared store", hint)
    try:
        return _opener(kind.lower())(url, timeout)
    except ValueError:  # what it says of the URL repeats parts of it, which may be those of a password
        raise UsageError(f"the URL {for_people(url)} cannot be read", _SUCH_AS) from None


def _opener(kind: str) -> Callable[[str, float], Blobs]:
    if kind in KINDS:
        try:
            backend = importlib.import_module(f"kvtool.core.remote.{KINDS[kind].module}")
        except ImportError as error:
            packages, extra = KINDS[kind].needs
            raise KvtoolError(f"{kind}:// needs the {packages}", extra_line(extra)) from error
        return cast(Callable[[str, float], Blobs], backend.from_url)
    if kind not in _PLUGINS:
        raise UsageError(f"there is no shared store of the kind {kind}://", f"known: {', '.join([*KINDS, *_PLUGINS])}")
    opener = _PLUGINS[kind].load()
    if not callable(opener):
        raise _PLUGINS[kind].broken("it is no function")
    return cast(Callable[[str, float], Blobs], opener)
