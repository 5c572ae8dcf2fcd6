"""What the connector's two halves tell each other, over stand-ins for the classes of vLLM that it builds on."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtool.core.errors import GateError, ModelError, StoreNotFoundError, UsageError
from kvtool.vllm.requests import check_config
from tests.wording import refused

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
IDS = list(range(64))


def config_of(**changes: Any) -> Any:
    """A configuration of vLLM: `changes` by the names of parts of parts."""
    known: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 2,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "distributed_executor_backend": "mp",
        },
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"async_scheduling": False},
        "kv_transfer_config": {"kv_connector": "KvtoolConnector"},
    }
    parts = {
        part: SimpleNamespace(**{name: changes.get(name, value) for name, value in own.items()})
        for part, own in known.items()
    }
    return SimpleNamespace(**parts, speculative_config=changes.get("speculative_config"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("pipeline_parallel_size", 2), ("decode_context_parallel_size", 2)),
        *(("distributed_executor_backend", "external_launcher"), ("prefill_context_parallel_size", 2)),
        *(("cache_dtype", "fp8"), ("async_scheduling", True), ("speculative_config", object())),
        ("kv_connector", "MultiConnector"),
    ],
)
def test_what_is_not_served_is_refused(name: str, value: object) -> None:
    check_config(config_of())
    with refused(UsageError):
        check_config(config_of(**{name: value}))


class Base:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


@dataclass
class BaseStats:
    data: dict[str, Any] = field(default_factory=dict)


class BaseMetrics:
    def __init__(self, config: Any, kinds: dict[Any, Any], labelnames: list[str], values: dict[int, list[str]]) -> None:
        self._counter_cls, self._gauge_cls, self._histogram_cls = (kinds[kind] for kind in (Counter, Gauge, Histogram))
        self._labelnames, self.per_engine_labelvalues = labelnames, values


STAND_INS: dict[str, dict[str, Any]] = {
    f"{CONNECTORS}.base": {
        "KVConnectorBase_V1": Base,
        "KVConnectorMetadata": object,
        "KVConnectorWorkerMetadata": object,
        "KVConnectorRole": SimpleNamespace(WORKER="worker", SCHEDULER="scheduler"),
    },
    f"{CONNECTORS}.metrics": {"KVConnectorStats": BaseStats, "KVConnectorPromMetrics": BaseMetrics},
    "vllm.v1.metrics.utils": {
        "create_metric_per_engine": lambda metric, values: {at: metric.labels(*own) for at, own in values.items()}
    },
    "vllm.distributed": {"get_tp_group": lambda: None},
    "vllm.logger": {"init_logger": logging.getLogger},
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for whole, content in STAND_INS.items():
        parts = whole.split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[whole].__dict__.update(content)
    own = ("kvtool.vllm.connector", "kvtool.vllm.connector")
    for name in own:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("kvtool.vllm.connector")
    for name in own:
        sys.modules.pop(name, None)


def connector_of(module: Any, role: str) -> Any:
    config = config_of()
    config.kv_transfer_config.kv_connector_extra_config = {"store": "none"}
    config.cache_config.block_size = 16
    config.scheduler_config.max_num_batched_tokens = 2048
    config.model_config = SimpleNamespace(max_model_len=2048)
    return module.KvtoolConnector(config, role, None)


def scheduled(**changes: Any) -> Any:
    own = {"req_id": "a", "prompt_token_ids": IDS, "block_ids": ([1, 2, 3, 4],), "num_computed_tokens": 0}
    new = SimpleNamespace(**own, **{"lora_request": None, "prompt_embeds": None, "mm_features": []} | changes)
    return SimpleNamespace(scheduled_new_reqs=[new], num_scheduled_tokens={"a": len(IDS)})


def request_of() -> Any:
    request = SimpleNamespace(request_id="a", num_prompt_tokens=64, prompt_token_ids=IDS, cache_salt=None)
    request.mm_features, request.lora_request, request.prompt_embeds = [], None, None
    request.skip_reading_prefix_cache, request.kv_transfer_params = False, None
    request.block_hashes, request.update_block_hashes = [], lambda: None
    return request


def heard(verdict: Any, invalid: Iterable[int] = ()) -> Any:
    return SimpleNamespace(kv_connector_worker_meta=verdict, invalid_block_ids={*invalid})


def test_prompts_are_compared_until_there_is_a_verdict_and_claimed_if_it_is_good(module: Any) -> None:
    request = SimpleNamespace(request_id="a", num_prompt_tokens=64, cache_salt="s")
    for passed, claimed in ((True, 63), (False, 0)):
        connector = connector_of(module, "scheduler")
        connector._found["a"] = object()
        for _ in range(2):  # the first comparison may have ended as an error
            assert connector.build_connector_meta(scheduled()).comparison is not None
            connector.update_connector_output(heard(None))
            assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        connector.update_connector_output(heard(module.Verdict(passed)))
        assert connector.build_connector_meta(scheduled()).comparison is None
        assert connector.get_num_new_matched_tokens(request, 0) == (claimed, False)


@pytest.mark.parametrize("other", [{"prompt_embeds": 1}, {"mm_features": [1]}, {"lora_request": 1}], ids=str)
def test_prompts_of_other_than_token_ids_are_not_compared(module: Any, other: dict[str, Any]) -> None:
    assert connector_of(module, "scheduler").build_connector_meta(scheduled(**other)).comparison is None


def test_blocks_that_were_not_filled_leave_the_prefix_cache(module: Any) -> None:
    connector, evicted = connector_of(module, "scheduler"), list[set[int]]()
    connector._kv_cache_manager = SimpleNamespace(evict_blocks=evicted.append)
    connector.update_connector_output(heard(None))
    connector.update_connector_output(heard(None, {3, 4}))
    assert evicted == [{3, 4}]


def test_a_prompt_that_may_share_blocks_waits_until_they_are_loaded(module: Any) -> None:
    connector = connector_of(module, "scheduler")
    one, same, other = request_of(), request_of(), request_of()
    for request, name, salt in ((one, "a", "s"), (same, "b", "s"), (other, "c", "t")):
        request.request_id = name
        connector._spotter.find = lambda ids, wish, salt=salt: SimpleNamespace(salt=salt, spans=(), options=None)
        connector.on_new_request(request)
    connector.update_connector_output(heard(module.Verdict(True)))
    assert connector.get_num_new_matched_tokens(one, 0) == (63, False)
    assert connector.get_num_new_matched_tokens(same, 0) == (63, False)  # the first one found no room
    connector.update_state_after_alloc(one, SimpleNamespace(get_block_ids=lambda: [[1, 2, 3, 4]]), 63)
    assert connector.get_num_new_matched_tokens(same, 48) == (None, False)
    assert connector.get_num_new_matched_tokens(other, 0) == (63, False)
    assert len(connector.build_connector_meta(scheduled()).loads) == 1
    assert connector.get_num_new_matched_tokens(same, 48) == (15, False)


def test_a_worker_reports_a_verdict_once_and_none_where_there_is_no_store(module: Any) -> None:
    connector = connector_of(module, "worker")
    connector.bind_connector_metadata(module.Step(comparison=object()))
    declined = (StoreNotFoundError("x"), None), (ModelError("x"), False), (ValueError("x"), False)
    for answer, reported in (*declined, (True, True), (False, False)):

        def compare(given: Any, answer: Any = answer) -> bool:
            if isinstance(answer, Exception):
                raise answer
            return bool(answer)

        connector._feeder.compare = compare
        connector.wait_for_save()
        assert getattr(connector.build_connector_worker_meta(), "passed", None) is reported
        assert connector.build_connector_worker_meta() is None
    connector._seen.remove()


def test_a_load_that_the_gate_refuses_ends_the_claims(module: Any) -> None:
    def load(wanted: Any) -> None:
        raise GateError("law 3")

    connector = connector_of(module, "worker")
    connector._feeder.load = load
    wanted = SimpleNamespace(ids=IDS, touched=lambda size: [5, 6])
    connector.bind_connector_metadata(module.Step([wanted]))
    connector.start_load_kv(None)
    assert connector.get_block_ids_with_load_errors() == {5, 6}
    assert connector.build_connector_worker_meta().passed is False
    connector._seen.remove()


def test_prompts_that_do_not_fit_the_model_end_the_claims_after_three_in_a_row(module: Any) -> None:
    connector, answers = connector_of(module, "worker"), list[int | None]()

    def load(wanted: Any) -> int:
        if (answer := answers.pop(0)) is None:
            raise ModelError("the store's records do not fit the model")
        return answer

    connector._feeder.load = load
    for given, gate, passed in (([None, None], None, None), ([7, None, None], [1], None), ([None], None, False)):
        answers += given
        connector.bind_connector_metadata(
            module.Step([SimpleNamespace(ids=IDS, touched=lambda size: [5])] * len(given))
        )
        connector.start_load_kv(None)
        assert connector.get_kv_connector_stats().data.get("gate") == gate
        assert getattr(connector.build_connector_worker_meta(), "passed", None) is passed
    connector._seen.remove()


def test_after_the_gate_has_failed_no_prompt_is_salted_or_looked_through(module: Any) -> None:
    for passed, salted in ((True, "s "), (False, None)):
        connector, request = connector_of(module, "scheduler"), request_of()
        connector._spotter.find = lambda ids, wish: SimpleNamespace(salt="s", spans=(), options=None)
        connector.update_connector_output(heard(module.Verdict(passed)))
        stats = connector.get_kv_connector_stats()
        assert (stats and stats.data) == (None if passed else {"gate": [-1]})
        connector.on_new_request(request)
        assert request.cache_salt == salted
        assert ("a" in connector._found) == passed


def test_vllms_model_is_the_first_module_with_logits_after_steps_without_any(module: Any) -> None:
    class Model(torch.nn.Linear):
        def compute_logits(self) -> None:
            """Do nothing."""

    connector, model = connector_of(module, "worker"), Model(1, 1)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    for _ in range(3):
        connector.bind_connector_metadata(module.Step())
    assert len(hooks) == before + 1
    for called in (torch.nn.Linear(1, 1), model, Model(1, 1)):
        called(torch.zeros(1))
    assert connector._feeder.model is model
    assert len(hooks) == before


def test_what_both_halves_note_is_in_the_metrics_of_their_engine(module: Any) -> None:
    def load(wanted: Any) -> int:
        if wanted is bad:
            raise ValueError("x")
        return 7

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = module.KvtoolConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"], 1: ["1"]})
    request = request_of()
    scheduler, worker = connector_of(module, "scheduler"), connector_of(module, "worker")
    scheduler._spotter.find = lambda ids, wish: SimpleNamespace(salt="s", spans=(), options=None)
    scheduler.on_new_request(request)
    scheduler.update_connector_output(heard(module.Verdict(True)))
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: [[1, 2, 3, 4]]), 63)
    good, bad = (SimpleNamespace(ids=IDS, touched=lambda size: [5]) for _ in range(2))
    worker._feeder.load = load
    worker.bind_connector_metadata(module.Step([good, bad]))
    worker.start_load_kv(None)
    worker._seen.remove()
    stats = worker.get_kv_connector_stats().aggregate(scheduler.get_kv_connector_stats())
    assert worker.get_kv_connector_stats() is scheduler.get_kv_connector_stats() is None
    sent = json.loads(json.dumps(stats.data))
    metrics.observe(sent, 1)
    found = {
        (sample.name.removeprefix("vllm:kvtool_"), sample.labels["engine"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }
    expected = {"prompts": 1, "claimed_tokens": 63, "recomputed_tokens": 7, "failed_loads": 1}
    for name, number in expected.items():
        assert [found[f"{name}_total", engine] for engine in "01"] == [0, number]
    assert [found["load_seconds_count", engine] for engine in "01"] == [0, 2]
    assert [found["gate", engine] for engine in "01"] == [0, 1]
    logged = module.KvtoolConnector.build_kv_connector_stats(sent).reduce()
    assert {name: logged[name] for name in expected} == expected
    assert module.Stats({"gate": [1, -1]}).reduce() == {"gate": -1}
