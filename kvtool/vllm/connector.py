"""KV connector of vLLM, and its metrics: prompts with stored passages get their keys and values from a kvtool store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.metrics.utils import create_metric_per_engine

from kvtool.core.errors import GateError, KvtoolError, ModelError
from kvtool.vllm.requests import FIELD, Passages, PassageSpotter, check_config
from kvtool.vllm.worker import Comparison, Feeder, Load

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


GATE, SECONDS = "gate", "load_seconds"
_COUNTED = {
    "prompts": "Prompts with stored passages.",
    "claimed_tokens": "Tokens of prompts that vLLM did not have to compute.",
    "recomputed_tokens": "Tokens of stored passages that were recomputed.",
    "failed_loads": "Prompts that vLLM computed although their tokens were claimed.",
}
_ABOUT_GATE = "Verdict of the gate: 1 passed and a prompt was fed, -1 failed, 0 neither yet."
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Stats(KVConnectorStats):
    """Numbers by the name of their metric, noted by one half of the connector since vLLM last asked."""

    data: dict[str, list[float]]

    def note(self, name: str, number: float = 1) -> None:
        self.data.setdefault(name, []).append(number)

    def taken(self) -> Stats | None:
        taken, self.data = self.data, {}
        return Stats(taken) if taken else None

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for name, numbers in other.data.items():
            self.data.setdefault(name, []).extend(numbers)
        return self

    def reduce(self) -> dict[str, int | float]:
        sums = {name: sum(numbers) for name, numbers in self.data.items() if name != GATE}
        return {name: round(number, 3) for name, number in sums.items()} | _verdict(self.data)


def _verdict(data: dict[str, Any]) -> dict[str, Any]:
    return {GATE: min(data[GATE])} if GATE in data else {}  # one worker that fails is enough


class PromMetrics(KVConnectorPromMetrics):
    """The metrics at `/metrics`. Their names begin as vLLM's own do: vLLM takes those off when an engine ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counters = {name: self._per_engine(self._counter_cls, name, about) for name, about in _COUNTED.items()}
        about = "Seconds that a prompt was loaded, those that failed included."
        self._seconds = self._per_engine(self._histogram_cls, SECONDS, about, buckets=_BUCKETS)
        self._gate = self._per_engine(self._gauge_cls, GATE, _ABOUT_GATE, multiprocess_mode="mostrecent")

    def _per_engine(self, kind: Any, name: str, about: str, **more: Any) -> Any:
        metric = kind(name=f"vllm:kvtool_{name}", documentation=about, labelnames=self._labelnames, **more)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(name, ())))
        for number in transfer_stats_data.get(SECONDS, ()):
            self._seconds[engine_idx].observe(number)
        for number in _verdict(transfer_stats_data).values():
            self._gate[engine_idx].set(number)


_logger = init_logger("vllm.kvtool")
_FEWEST_COMPARED, _MOST_COMPARED = 48, 512  # tokens of a request that the gate compares
_MOST_REFUSED = 3  # prompts, one after another, whose passages do not fit the model


@dataclass
class Step(KVConnectorMetadata):
    """The work of one step of vLLM: `loads` before its forward, `comparison` after it."""

    loads: list[Load] = field(default_factory=list)
    comparison: Comparison | None = None


@dataclass
class Verdict(KVConnectorWorkerMetadata):
    passed: bool

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Verdict:
        assert isinstance(other, Verdict)
        return Verdict(self.passed and other.passed)


class KvtoolConnector(KVConnectorBase_V1):
    """A KV connector over a kvtool store: stored passages are spotted in prompts, fused, and written to vLLM's blocks.

    All but a prompt's last token is claimed, so vLLM computes one row. What cannot be loaded is reported to vLLM, which
    then computes the prompt itself. Until a prompt of 48 tokens was compared, nothing is claimed.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_config(vllm_config)
        # A prompt whose records cannot be read would end as an error otherwise.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        config = self._kv_transfer_config.kv_connector_extra_config
        self._block_size: int = vllm_config.cache_config.block_size
        self._found: dict[str, Passages] = {}
        self._due: list[Load] = []
        self._loading = set[str | None]()  # salts of the requests whose blocks this step fills
        self._failed: set[int] = set()
        self._stats, self._refused = Stats(), 0
        self._verdict: Verdict | None = None  # in the worker: what is not reported yet
        self._seen: Any = None  # the hook that waits for the model
        self._spotter = PassageSpotter(config, _warn, vllm_config.scheduler_config.max_num_batched_tokens)
        context = vllm_config.model_config.max_model_len
        self._feeder: Feeder | None = None
        if role == KVConnectorRole.WORKER:
            blocks = getattr(kv_cache_config, "num_blocks", None)
            self._feeder = Feeder(config, context, self._block_size, _warn, get_tp_group(), blocks)

    # ---- in the scheduler ----

    @property
    def _has_failed(self) -> bool:
        return self._verdict is not None and not self._verdict.passed

    def on_new_request(self, request: Request) -> None:
        if not _is_plain(request) or self._has_failed:
            return
        wish = (request.kv_transfer_params or {}).get(FIELD)
        found = self._spotter.find(request.prompt_token_ids or (), wish)
        if found is not None:
            self._found[request.request_id] = found
            self._stats.note("prompts")
            request.cache_salt = f"{found.salt} {request.cache_salt or ''}"
            request.block_hashes.clear()
            request.update_block_hashes()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A prompt that may share blocks with one that is loaded in the same step waits: if that load fails, vLLM
        counts the shared blocks as computed before they are."""
        if request.request_id not in self._found or not (self._verdict and self._verdict.passed):
            return 0, False
        if request.cache_salt in self._loading:
            return None, False
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            found, stop = self._found[request.request_id], request.num_prompt_tokens - 1
            self._stats.note("claimed_tokens", num_external_tokens)
            self._loading.add(request.cache_salt)
            ids, own = tuple(request.prompt_token_ids or ()), tuple(blocks.get_block_ids()[0])
            self._due.append(Load(ids, found.spans, found.options, stop - num_external_tokens, stop, own))

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, self._due = Step(self._due), []
        self._loading.clear()
        for new in scheduler_output.scheduled_new_reqs if self._verdict is None else ():
            count = min(scheduler_output.num_scheduled_tokens[new.req_id], _MOST_COMPARED)
            ids = tuple(new.prompt_token_ids or ())[:count]
            is_plain = new.lora_request is None and new.prompt_embeds is None and not new.mm_features
            if is_plain and new.num_computed_tokens == 0 and len(ids) >= _FEWEST_COMPARED:
                step.comparison = Comparison(ids, tuple(new.block_ids[0]))
                break
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        verdict = connector_output.kv_connector_worker_meta
        if isinstance(verdict, Verdict):
            self._verdict = verdict
            if not verdict.passed:
                self._stats.note(GATE, -1)
        # vLLM leaves them there: it counts on their request to compute them, which may be aborted before.
        if connector_output.invalid_block_ids:
            self._kv_cache_manager.evict_blocks(connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._found.pop(request.request_id, None)
        return False, None

    # ---- in both ----

    def get_kv_connector_stats(self) -> Stats | None:
        return self._stats.taken()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> PromMetrics:
        return PromMetrics(*given)

    # ---- in the worker ----

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._feeder is not None and self._seen is None:
            self._seen = torch.nn.modules.module.register_module_forward_pre_hook(self._see_model)

    def _see_model(self, module: torch.nn.Module, args: Any) -> None:
        """Note vLLM's model, the first module with logits that is called; connectors are not handed it."""
        if self._feeder is not None and hasattr(module, "compute_logits"):
            self._seen.remove()
            self._feeder.model = module

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._feeder is not None and self._step.loads:
            self._feeder.ranks.lead(self._load)

    def _load(self) -> None:
        assert self._feeder is not None
        for load in self._step.loads:
            started = time.perf_counter()
            try:
                self._stats.note("recomputed_tokens", self._feeder.load(load))
                self._stats.note(GATE, 1)
                self._refused = 0
            except Exception as error:  # whatever it is, vLLM can compute these blocks itself
                _warn(f"a prompt of {len(load.ids)} tokens is computed by vLLM: {error}", "")
                self._failed.update(load.touched(self._block_size))
                self._stats.note("failed_loads")
                self._refused += isinstance(error, ModelError)
                if isinstance(error, GateError) or self._refused >= _MOST_REFUSED:
                    self._verdict = Verdict(passed=False)
            self._stats.note(SECONDS, time.perf_counter() - started)

    def wait_for_save(self) -> None:
        if self._step.comparison is not None and self._feeder is not None:
            self._feeder.ranks.lead(self._compare)

    def _compare(self) -> None:
        assert self._step.comparison is not None
        assert self._feeder is not None
        try:
            self._verdict = Verdict(self._feeder.compare(self._step.comparison))
        except Exception as error:
            _warn(f"nothing is loaded from the store: {error}", "")
            # A store may be made, or mended, until the next prompt; the model stays what it is.
            if isinstance(error, ModelError) or not isinstance(error, KvtoolError | OSError):
                self._verdict = Verdict(passed=False)

    def build_connector_worker_meta(self) -> Verdict | None:
        verdict, self._verdict = self._verdict, None
        return verdict

    @property
    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are filled before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a store is filled by `kvtool ingest`."""


def _is_plain(request: Request) -> bool:
    others: Sequence[object] = (request.mm_features, request.lora_request, request.prompt_embeds)
    return not any(other is not None and other != [] for other in others) and not request.skip_reading_prefix_cache


@lru_cache(1000)
def _warn(text: str, hint: str) -> None:
    _logger.warning("kvtool: %s", f"{text}; {hint}" if hint else text)
