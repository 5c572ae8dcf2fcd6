"""Which backend a URL names, and what of a URL people are shown. A new backend is a file beside this, a line here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvtool.core.errors import UsageError
from kvtool.core.remote.blobs import TIMEOUT, Blobs

HIDDEN = "***"
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\])(:(\d{1,5}))?")
SHOWN = ("prefix", "db", "protocol")  # what may stand behind `?` and is no secret
# the sign @ stands before the URLs: one behind a URL would look like the end of its password, which `scrubbed` hides
_SUCH_AS = "in a password write / @ ? # as %2F %40 %3F %23; such as redis://host:6379/0 or file:///mnt/shared/kv"


def is_url(place: str) -> bool:
    """Whether a store's place is a shared tier rather than a local folder; a URL that is written wrong is one, too."""
    kind, colon, _ = place.partition(":")
    return "://" in place or (colon != "" and kind.lower() in _KINDS)


def open_blobs(url: str, timeout: float = TIMEOUT) -> Blobs:
    """The tier of a URL; nothing is asked of it yet.

    Raises
    ------
    UsageError : no such kind of URL, or a broken one.
    KvtoolError : a package is missing.
    """
    kind, mark, _ = url.partition("://")
    if not mark or not _KIND.fullmatch(kind):
        raise UsageError(f"{for_people(url)} is no URL of a shared store", _SUCH_AS)
    if kind.lower() not in _KINDS:
        raise UsageError(f"there is no shared store of the kind {kind.lower()}://", f"known: {', '.join(_KINDS)}")
    try:
        return _KINDS[kind.lower()](url, timeout)
    except ValueError:  # what it says of the URL repeats parts of it, which may be those of a password
        raise UsageError(f"the URL {for_people(url)} cannot be read", _SUCH_AS) from None


def _folder(url: str, timeout: float) -> Blobs:
    from kvtool.core.remote.folder import FolderBlobs

    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise UsageError(f"{for_people(url)} names no folder of this machine", "such as file:///mnt/shared/kv")
    return FolderBlobs(path)


def _redis(url: str, timeout: float) -> Blobs:
    from kvtool.core.remote.redis import RedisBlobs

    parts = urlsplit(url)
    more = parts.path + parts.query
    if not _is_host(parts.netloc.rpartition("@")[2]) or parts.fragment or url.count("@") > 1 or "@" in more:
        raise ValueError("a password that is not escaped would be taken for a host, and looked up")
    return RedisBlobs(url, timeout)


_KINDS: dict[str, Callable[[str, float], Blobs]] = {"redis": _redis, "rediss": _redis, "file": _folder}


# ---- for people --------------------------------------------------------------------------------------------------


def for_people(url: str) -> str:
    """A URL as it may be shown, written down and sent: without user and password, nor what might be a part of them.

    Also of one that cannot be read, since people forget to escape what stands in a password: whatever is not plainly a
    host, a port, a database or a prefix is hidden.
    """
    kind, mark, rest = url.partition("://")
    if not mark or not _KIND.fullmatch(kind):
        return url if not is_url(url) and "@" not in url else f"{kind}:{HIDDEN}" if kind in _KINDS else HIDDEN
    if kind.lower() == "file" and rest.startswith("/"):
        return url
    place, tail = re.fullmatch(r"([^/?#]*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    if "@" in tail:  # a part of a password, or not: nobody can tell
        return f"{kind}://{HIDDEN}"
    _, at, place = place.rpartition("@")
    path, _, query = tail.partition("?")
    shown = (f"{HIDDEN}@" if at else "") + (place if _is_host(place) else HIDDEN)
    shown += path if re.fullmatch(r"(/\d*)?", path) else f"/{HIDDEN}"
    return f"{kind}://{shown}" + (f"?{_query_for_people(query)}" if query else "")


def _is_host(text: str) -> bool:
    found = _HOST.fullmatch(text)
    return found is not None and int(found[4] or 0) < 2**16


def _query_for_people(query: str) -> str:
    shown = []
    for part in query.split("&"):
        name, mark, _ = part.partition("=")
        known = mark and name in SHOWN and "#" not in part
        shown.append(part if known else f"{name}={HIDDEN}" if mark and name.isidentifier() else HIDDEN)
    return "&".join(shown)


def scrubbed(text: str) -> str:
    """Any text with its URLs as people are shown them: for what other programs say of them."""
    return _IN_TEXT.sub(_scrub, text) if ":" in text else text


_IN_TEXT = re.compile(
    rf"(?:[^\s'\"`(]*@)?\b(?:(?:{'|'.join(_KINDS)}):|[A-Za-z][A-Za-z0-9+.-]*://(?=\S*@))(?:[^\n]*@)?[^\s'\"`]*", re.I
)


def _scrub(found: re.Match[str]) -> str:
    url = found[0].rstrip(":;,.)]")
    if not is_url(url):
        return found[0]
    after = found[0][len(url) :]
    return (for_people(url) if "//" in url or "@" in url else url) + after


def place_of(url: str) -> str:
    """What of a URL tells one tier from another: no secret, so it may name a folder."""
    if url.partition("://")[0].lower() == "file":
        return url
    rest = url.rpartition("@")[2]
    start, _, query = rest.partition("?")
    kept = [part for part in query.split("&") if part.partition("=")[0] in SHOWN]
    return start + (f"?{'&'.join(kept)}" if kept else "")
