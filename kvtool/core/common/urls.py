"""URLs of shared stores: what of them people are shown, and whether a store's place is one.

`KINDS` is the registry of backends: a new one is a module of `kvtool.core.remote` with `from_url`, and a line here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of shared store: the module of its backend, and the packages that it needs, with kvtool's extra.

    `is_path`: its URLs name a path of this machine. `has_folder`: the path after the host is a folder, no secret.
    """

    module: str
    needs: tuple[str, str] = ("", "")
    is_path: bool = False
    has_folder: bool = False


_OBJECTS = Kind("object_store", ("package obstore", "objects"), has_folder=True)
_REDIS = Kind("redis", ("packages redis and hiredis", "redis"))
_WEB = ("https", "http")
KINDS: Mapping[str, Kind] = {
    "redis": _REDIS,
    "rediss": _REDIS,
    "file": Kind("folder", is_path=True),
    **dict.fromkeys(("s3", "gs", "az", *_WEB), _OBJECTS),
}
HIDDEN = "***"
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
SHOWN = ("prefix", "db", "protocol")  # parameters after `?` that are no secrets
_FOLDER = re.compile(r"(/[\w.%+=!~*'()-]*)*")
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\])(:(\d{1,5}))?")


def is_url(address: str) -> bool:
    """Return True if a store's place is a shared store's URL, also a malformed one, and not a local folder."""
    kind, colon, _ = address.partition(":")
    return "://" in address or (colon != "" and kind.lower() in KINDS)


def for_people(url: str) -> str:
    """Make a URL that may be shown, written down and sent: without user, password and what might be a part of them.

    People forget to escape passwords: whatever is not plainly a host, a port, a database or a prefix is hidden.
    """
    kind, mark, rest = url.partition("://")
    if not mark or not SCHEME.fullmatch(kind):
        return url if not is_url(url) and "@" not in url else f"{kind}:{HIDDEN}" if kind in KINDS else HIDDEN
    known = KINDS.get(kind.lower(), Kind(""))
    if known.is_path and rest.startswith("/"):
        return url
    host, tail = re.fullmatch(r"([^/?#]*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    if "@" in tail:  # perhaps a part of a password
        return f"{kind}://{HIDDEN}"
    _, at, host = host.rpartition("@")
    path, _, query = tail.partition("?")
    shown = (f"{HIDDEN}@" if at else "") + (host if is_host(host) else HIDDEN)
    shown += path if re.fullmatch(_FOLDER if known.has_folder else r"(/\d*)?", path) else f"/{HIDDEN}"
    return f"{kind}://{shown}" + (f"?{_query_for_people(query)}" if query else "")


def is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    return match is not None and int(match[4] or 0) < 2**16


def _query_for_people(query: str) -> str:
    shown = []
    for part in query.split("&"):
        name, mark, _ = part.partition("=")
        is_shown = mark and name in SHOWN and "#" not in part
        shown.append(part if is_shown else f"{name}={HIDDEN}" if mark and name.isidentifier() else HIDDEN)
    return "&".join(shown)


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def scrubbed(text: str) -> str:
    """Show the URLs in any text as people may see them: for what other programs say of them."""
    text = _SIGNED.sub(rf"\1{HIDDEN}", text) if "=" in text else text
    return _IN_TEXT.sub(_scrub, text) if ":" in text else text


_OWN = "|".join(kind for kind in KINDS if kind not in _WEB)  # other programs speak of https:// that holds no secret
_IN_TEXT = re.compile(
    rf"(?:[^\s'\"`(]*@)?\b(?:(?:{_OWN}):|[A-Za-z][A-Za-z0-9+.-]*://(?=\S*@))(?:[^\n]*@)?[^\s'\"`]*", re.I
)
# Secrets in an address that give their holder its owner's rights, also where a path was made of the address.
_SIGNED = re.compile(
    r"([?&](?:sig|[\w-]*(?:signature|token|credential|password|key))=)[^\s&'\"`)]*[^\s&'\"`):;,.]", re.I
)


def _scrub(match: re.Match[str]) -> str:
    url = match[0].rstrip(":;,.)]")
    if not is_url(url):
        return match[0]
    after = match[0][len(url) :]
    return (for_people(url) if "//" in url or "@" in url else url) + after


def place_of(url: str) -> str:
    """Return the part of a URL that distinguishes shared stores: it holds no secret, so it may name a folder."""
    if KINDS.get(url.partition("://")[0].lower(), Kind("")).is_path:
        return url
    rest = url.rpartition("@")[2]
    start, _, query = rest.partition("?")
    parts = [part for part in query.split("&") if part.partition("=")[0] in SHOWN]
    return start + (f"?{'&'.join(parts)}" if parts else "")
