"""Which backend a URL names. A new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvtool.core.errors import UsageError
from kvtool.core.remote.blobs import TIMEOUT, Blobs


def is_url(place: str) -> bool:
    """Whether a store's place is a shared tier rather than a local folder."""
    return "://" in place


def open_blobs(url: str, timeout: float = TIMEOUT) -> Blobs:
    """The tier of a URL; nothing is asked of it yet.

    Raises
    ------
    UsageError : no such kind of URL, or a broken one.
    KvtoolError : a package is missing.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in _KINDS:
        raise UsageError(f"there is no shared store of the kind {scheme}://", f"known: {', '.join(_KINDS)}")
    return _KINDS[scheme](url, timeout)


def _folder(url: str, timeout: float) -> Blobs:
    from kvtool.core.remote.folder import FolderBlobs

    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise UsageError(f"{url} names no folder of this machine", "such as file:///mnt/shared/kv")
    return FolderBlobs(path)


def _redis(url: str, timeout: float) -> Blobs:
    from kvtool.core.remote.redis import RedisBlobs

    try:
        urlsplit(url).port  # noqa: B018 - a port that is no number is found only when it is asked for
    except ValueError as error:
        raise UsageError(f"the Redis URL cannot be read: {error}", "such as redis://host:6379/0") from error
    return RedisBlobs(url, timeout)


_KINDS: dict[str, Callable[[str, float], Blobs]] = {"redis": _redis, "rediss": _redis, "file": _folder}
