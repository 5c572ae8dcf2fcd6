"""Opens the shared store that a URL names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from kvtool.core.common.plugins import found
from kvtool.core.common.urls import KINDS, SCHEME, for_people, is_url
from kvtool.core.errors import UsageError
from kvtool.core.remote.blobs import TIMEOUT, Blobs

# the sign @ stands before the URLs: one behind a URL would look like the end of its password, which `scrubbed` hides
_SUCH_AS = "in a password write / @ ? # as %2F %40 %3F %23; such as redis://host:6379/0 or file:///mnt/shared/kv"

_PLUGINS = found("blobs", own=KINDS)


def open_blobs(url: str, timeout: float = TIMEOUT) -> Blobs:
    """The tier of a URL; nothing is asked of it yet.

    Raises
    ------
    UsageError : no such kind of URL, or a broken one.
    KvtoolError : a package is missing. PluginError : the plugin for such URLs cannot be used.
    """
    kind, mark, _ = url.partition("://")
    if not mark or not SCHEME.fullmatch(kind):
        raise UsageError(f"'{for_people(url)}' is no URL of a shared store", _way_to_a_url(url))
    try:
        return _opener(kind.lower())(url, timeout)
    except ValueError:  # what it says of the URL repeats parts of it, which may be those of a password
        raise UsageError(f"the URL {for_people(url)} cannot be read", _SUCH_AS) from None


def _way_to_a_url(place: str) -> str:
    """Return a hint for a place that is no URL: usually it is the path of a folder."""
    if is_url(place) or "@" in place or "\0" in place:  # something meant as a URL, with a password perhaps
        return _SUCH_AS
    return f"a folder is named by {Path(place).absolute().as_uri()}; others are such as redis://host:6379/0"


def _opener(kind: str) -> Callable[[str, float], Blobs]:
    """Return the function that opens URLs of a kind, given the URL and the seconds to wait for a value."""
    if kind in KINDS:
        backend = importlib.import_module(f"kvtool.core.remote.{KINDS[kind].module}")
        return cast(Callable[[str, float], Blobs], backend.from_url)
    if kind not in _PLUGINS:
        raise UsageError(f"there is no shared store of the kind {kind}://", f"known: {', '.join([*KINDS, *_PLUGINS])}")
    opener = _PLUGINS[kind].load()
    if not callable(opener):
        raise _PLUGINS[kind].broken("it is no function")
    return cast(Callable[[str, float], Blobs], opener)
