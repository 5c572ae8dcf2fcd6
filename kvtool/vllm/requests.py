"""Requests of vLLM that hold stored passages: which ones, how they are fused, and the salt that vLLM caches them by.

Blocks that were filled from a store are approximate. vLLM finds blocks again by a hash of the token ids before them;
the salt, which goes into that hash, keeps them from requests that are computed exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.selectors import AUTO, REFERENCE, selector_for
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import spotted
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.spotting import Span

FIELD = "kvtool"  # of a request's `kv_transfer_params`: a fusion mode, options by name, or false
_SETTINGS = ("fusion", "ratio", "link_tokens", "link", "shift", "level", "max_loss", "load_timeout")


@dataclass(frozen=True, slots=True)
class Passages:
    """The stored passages in a request's prompt.

    Attributes
    ----------
    spans : where they are.
    options : how they are fused.
    salt : differs between prompts whose blocks may differ although the token ids before them are the same.
    """

    spans: tuple[Span, ...]
    options: QueryOptions
    salt: str


class PassageSpotter:
    """Spots stored passages in requests.

    Parameters
    ----------
    config : `kv_connector_extra_config`: `store`, and options of `kvtool query` that say how to fuse.
    warn : reports why requests are left to vLLM.
    most : tokens outside passages that a request may have: they are computed in one step of vLLM.

    Raises
    ------
    UsageError : no store is named, or an option is unknown or wrong.
    """

    def __init__(self, config: Mapping[str, Any], warn: Warn, most: int = 1 << 20) -> None:
        if not config.get("store"):
            raise UsageError("kv_connector_extra_config names no store", 'add "store": "PATH"')
        self._path = Path(config["store"])
        self._settings = {name: value for name, value in config.items() if name != "store"}
        self._warn, self._most = warn, most
        self.options(None)

    def options(self, wish: object) -> QueryOptions | None:
        """Return how a request's passages are fused; None: not at all.

        Parameters
        ----------
        wish : what its `kv_transfer_params` have as `kvtool`.

        Raises
        ------
        UsageError : an option is unknown or wrong.
        """
        if wish is False:
            return None
        more = {"fusion": wish} if isinstance(wish, str) else {} if wish is None or wish is True else wish
        if not isinstance(more, Mapping):
            raise UsageError(f"{FIELD!r} of a request is {wish!r}", "give a fusion mode, options by name, or false")
        settings = self._settings | dict(more)
        if unknown := [name for name in settings if name not in _SETTINGS]:
            raise UsageError(f"the connector has no option {unknown[0]!r}", f"known: store, {', '.join(_SETTINGS)}")
        options = QueryOptions.of(settings)
        mode = options.mode()
        if mode == AUTO:
            raise UsageError("the connector has no fusion mode 'auto'", "name a mode: vLLM's speed is not known to it")
        selector_for(options, mode)
        return None if mode == REFERENCE else options

    @cached_property
    def _store(self) -> Store:
        return Store.open(self._path)

    @cached_property
    def _finder(self) -> Finder:
        return Finder(self._store, self._warn)

    def find(self, ids: Sequence[int], wish: object = None) -> Passages | None:
        """Find the passages in a prompt; None: there are none, or the store cannot be used, which is reported."""
        try:
            options = self.options(wish)
            if options is None:
                return None
            with self._store.view():
                spans = tuple(spotted(self._finder.spot(ids[:-1])))  # vLLM computes the last token at least
                revision = self._store.revision()
        except KvtoolError as error:
            self._warn(error.message, error.hint)
            return None
        except Exception as error:  # whatever a client sends, vLLM's engine must not end with it
            self._warn(f"a prompt of {len(ids)} tokens is left to vLLM: {error!r}", "")
            return None
        if not spans or len(ids) - sum(map(len, spans)) > self._most:
            return None
        selector = selector_for(options, options.mode())
        rest = () if selector.ignores_question else tuple(ids)
        named = repr((str(self._path), revision, options.level, options.max_loss, selector, spans, rest))
        return Passages(spans, options, f"kvtool-{blake2b(named.encode(), digest_size=16).hexdigest()}")
