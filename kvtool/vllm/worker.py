"""Feeding of vLLM's paged cache in a worker: a prompt's fused keys and values are computed and written to its blocks.

Nothing is fed before the gate has passed: kvtool's rows over vLLM's modules are compared with what vLLM itself wrote of
a request's prompt, and the laws of `kvtool help design` are checked for this model and store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Warn
from kvtool.core.errors import GateError, KvtoolError, ModelError
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import plan_spotted
from kvtool.core.retrieval.spotting import Span
from kvtool.core.session.gate import TOLERANCE
from kvtool.core.session.identity import store_identity
from kvtool.core.session.session import Session
from kvtool.vllm.model import VllmDecoder
from kvtool.vllm.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Load:
    """Fill a request's places `first` … `stop`. `ids`: of the whole prompt. `blocks`: of the request, in order."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    options: QueryOptions
    first: int
    stop: int
    blocks: tuple[int, ...]

    def touched(self, block_size: int) -> Sequence[int]:
        return self.blocks[self.first // block_size : -(-self.stop // block_size)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compare the keys and values of these first tokens of a request, which vLLM computes in this step."""

    ids: tuple[int, ...]
    blocks: tuple[int, ...]


class Feeder:
    """Fills blocks of vLLM's paged cache from a store. `model`: vLLM's; None until its first step."""

    def __init__(
        self,
        config: Mapping[str, Any],
        context: int,
        block_size: int,
        warn: Warn,
        group: Any = None,
        blocks: int | None = None,
    ) -> None:
        self._path, self._context, self._block_size = Path(config["store"]), context, block_size
        self._warn, self._group, self._blocks = warn, group, blocks
        self._session: Session | None = None
        self._difference: float | None = None  # between what vLLM and what kvtool computes; None: not measured
        self.model: Any = None

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.model, self._group)

    @property
    def session(self) -> Session:
        if self._session is not None:
            with suppress(KvtoolError):
                self._session.store.follow()
                return self._session
            self._close()
        if self.model is None:
            raise ModelError("vLLM's model was not seen yet", "this is a bug in kvtool")
        dtype = next(self.model.parameters()).dtype
        with ExitStack() as opened:
            store = opened.enter_context(Store.open(self._path))
            kv_dtype = getattr(torch, store_identity(store).dtype)
            decoder = VllmDecoder(self.model, dtype, kv_dtype, self._context, self.ranks, self._blocks)
            self._session = Session.open(store, decoder=decoder, warn=self._warn)
            opened.pop_all()
        return self._session

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def compare(self, given: Comparison) -> bool:
        """Measure how far kvtool's prefill is from what vLLM has just written of the same tokens."""
        decoder: Any = self.session.decoder
        _, cache = decoder.prefill(given.ids)
        count = -(-len(given.ids) // self._block_size)
        places = torch.arange(len(given.ids), device=decoder.device)
        blocks = torch.tensor(given.blocks[:count], device=decoder.device)
        found: list[float] = []
        for layer, keys, values in _rows(cache, slice(0, len(given.ids))):
            found += self.ranks.call("differ", layer, keys, values, blocks, places)
        self._difference = max(found) if all(map(isfinite, found)) else inf
        try:
            self._check_difference()
        except GateError as error:
            self._warn(error.message, error.hint)
            return False
        return True

    def _check_difference(self) -> None:
        allowed = TOLERANCE[self.session.decoder.dtype]
        if self._difference is None:
            raise GateError("kvtool's prefill was not compared with vLLM's", "an earlier line of the log says why")
        if not self._difference <= allowed:
            what = f"kvtool's prefill over vLLM's modules differs from vLLM's by {self._difference:.3g} > {allowed:.3g}"
            raise GateError(what, "vLLM computes these prompts itself; report the model")

    def load(self, wanted: Load) -> int:
        """Fuse a prompt and write its rows to the request's blocks; return the number of recomputed tokens."""
        self._check_difference()
        session = self.session
        with ExitStack() as ended, session.lock, session.store.view():
            try:
                session.refresh()
            except ModelError:  # the store was made anew: the next load opens it, and the gate is run again
                ended.callback(self._close)
                raise
            plan = plan_spotted(session, wanted.ids, wanted.spans, wanted.options)
            if not session.check_gate([segment.source.chunk_id for segment in plan.cached]):
                raise ModelError("the store's records do not fit the model", "use a store of this model")
            selector = selector_for(wanted.options, wanted.options.mode())
            fused = fuse(session.decoder, plan, selector, session.source, patience=wanted.options.load_timeout)
        device = session.decoder.device
        places = torch.arange(wanted.first, wanted.stop, device=device)
        blocks = torch.tensor(wanted.blocks, device=device)
        slots = blocks[places // self._block_size] * self._block_size + places % self._block_size
        for layer, keys, values in _rows(fused.cache, slice(wanted.first, wanted.stop)):
            self.ranks.call("write", layer, keys, values, slots)
        return fused.tokens.recomputed


def _rows(cache: PromptCache, some: slice) -> Any:
    """Yield for each layer its number, and keys and values `[rows, kv_heads, head_dim]`."""
    for layer, buffer in enumerate(cache.buffers):
        yield layer, *(side[0, :, some].transpose(0, 1).contiguous() for side in (buffer.keys, buffer.values))
