"""Supported configurations of vLLM, and requests that hold stored passages: how they are fused, and their salt.

Blocks that were filled from a store are approximate. vLLM finds blocks again by a hash of the token ids before them;
the salt, which goes into that hash, keeps them from requests that are computed exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.plan import LoadSpeed, PassSpeed, PromptRows, Speeds
from kvtool.core.fusion.plan import Span as Row
from kvtool.core.fusion.selectors import AUTO, REFERENCE
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import spotted
from kvtool.core.retrieval.finder import token_ids
from kvtool.core.retrieval.index import index_of
from kvtool.core.retrieval.spotting import Span, Spotter

_DTYPES = ("auto", "float16", "bfloat16", "float32")


_SIZES = ("pipeline_parallel", "prefill_context_parallel", "decode_context_parallel")


def check_config(config: Any) -> None:
    parallel, dtype = config.parallel_config, config.cache_config.cache_dtype
    launcher = getattr(parallel, "distributed_executor_backend", None)
    outer, ranks = config.kv_transfer_config.kv_connector, "serve the model on one rank, or on tensor-parallel ones"
    for is_set, what, hint in (
        *((getattr(parallel, f"{name}_size", 1) > 1, f"support {name}_size", ranks) for name in _SIZES),
        # Each rank would have a scheduler of its own, and only the first one's would hear the gate's verdict.
        (launcher == "external_launcher", "support external_launcher", "start vLLM by vllm serve"),
        (dtype not in _DTYPES, f"fill a cache of {dtype}", "leave --kv-cache-dtype out"),
        # The next step would be scheduled, with a first token of nothing, before vLLM hears that a load has failed.
        (config.scheduler_config.async_scheduling, "support asynchronous scheduling", "add --no-async-scheduling"),
        (config.speculative_config is not None, "support speculative decoding", "leave --speculative-config out"),
        # What to do after a failed load is read from the outermost connector's settings alone.
        (outer != "KvtoolConnector", f"run within {outer}", "name it as kv_connector itself"),
    ):
        if is_set:
            raise UsageError(f"the kvtool connector does not {what}", hint)


FIELD = "kvtool"  # of a request's `kv_transfer_params`: a fusion mode, options by name, or false
_SETTINGS = ("fusion", "ratio", "link_tokens", "link", "shift", "level", "max_loss", "load_timeout")
_PATIENCE = 0.2  # seconds that a request waits for the index after the store has changed
_ONE_LAYER = Speeds(PassSpeed(0, 0, 0), {"": LoadSpeed(0, 0, 0, 0)}, layers=1)


@dataclass(frozen=True, slots=True)
class Passages:
    """The stored passages in a prompt. `salt`: differs where blocks may, although the token ids before are the same."""

    spans: tuple[Span, ...]
    options: QueryOptions
    salt: str


class PassageSpotter:
    """Spots stored passages in requests. Raises UsageError for a wrong `kv_connector_extra_config`.

    `most`: rows that a request may have computed in one layer: all of them are computed in one step of vLLM.
    """

    def __init__(self, config: Mapping[str, Any], warn: Warn, most: int = 1 << 20, patience: float = _PATIENCE) -> None:
        if not config.get("store"):
            raise UsageError("kv_connector_extra_config names no store", 'add "store": "PATH"')
        self._path = Path(config["store"])
        self._settings = {name: value for name, value in config.items() if name != "store"}
        self._warn, self._most, self._patience = warn, most, patience
        self._store: Store | None = None
        self._spotter, self._indexed, self._thread = Spotter(self._token_ids), -1, Thread()
        self.options(None)

    def options(self, wish: object) -> QueryOptions | None:
        """Return how a request's passages are fused, by its `kv_transfer_params`; None: not at all."""
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

    def _token_ids(self, chunk_id: bytes) -> Sequence[int]:
        return () if self._store is None else token_ids(self._store, chunk_id)

    def _opened(self) -> Store:
        if self._store is not None:
            with suppress(KvtoolError):
                self._store.follow()
                self._follow(self._store)
                return self._store
            self._store.close()
        self._store, self._indexed = None, -1
        self._store = Store.open(self._path)
        self._follow(self._store)
        return self._store

    def _follow(self, store: Store) -> None:
        """Bring the index up to date in a thread: vLLM's scheduler would wait for seconds where many chunks are new."""
        if (revision := store.revision()) != self._indexed and not self._thread.is_alive():
            self._thread = Thread(target=self._index, args=(store, revision), daemon=True)
            self._thread.start()
            self._thread.join(self._patience)

    def _index(self, store: Store, revision: int) -> None:
        try:
            with Store.open(self._path) as own:  # the scheduler would wait for a view of its own store
                index = index_of(own, self._warn)
            spotter = copy(self._spotter)
            spotter.update(index.chunk_ids())
            self._spotter = spotter
        except Exception as error:  # tried again at the next change
            self._warn(f"passages that were stored last are not found: {error!r}", "")
        if self._store is store:
            self._indexed = revision

    def find(self, ids: Sequence[int], wish: object = None) -> Passages | None:
        """Find the passages in a prompt; None: there are none, or the store cannot be used, which is reported."""
        try:
            options = self.options(wish)
            if options is None:
                return None
            store = self._opened()
            with store.view():
                spans = tuple(spotted(self._spotter.spot(ids[:-1])))  # vLLM computes the last token at least
                revision = store.revision()
            selector = selector_for(options, options.mode())
            if not spans or _rows(len(ids), spans, selector) > self._most:
                return None
        except KvtoolError as error:
            self._warn(error.message, error.hint)
            return None
        except Exception as error:  # whatever a client sends, vLLM's engine must not end with it
            self._warn(f"a prompt of {len(ids)} tokens is left to vLLM: {error!r}", "")
            return None
        rest = () if selector.ignores_question else tuple(ids)
        named = repr((str(self._path), store.uuid, revision, options.level, options.max_loss, selector, spans, rest))
        return Passages(spans, options, f"kvtool-{blake2b(named.encode(), digest_size=16).hexdigest()}")


def _rows(tokens: int, spans: Sequence[Span], selector: Selector) -> float:
    own = tokens - sum(map(len, spans))
    prompt = PromptRows([Row(own, "fresh"), *(Row(len(span), "hit", "") for span in spans)], _ONE_LAYER)
    cost = selector.cost(prompt)
    return own + (prompt.hits if "hit" in cost.computes else cost.overlapped + cost.after)
