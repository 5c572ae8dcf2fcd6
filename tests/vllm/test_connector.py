"""What the connector's two halves tell each other, over stand-ins for the classes of vLLM that it builds on."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvtool.core.errors import GateError
from tests.vllm.test_config import config_of

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
IDS = list(range(64))


class Base:
    """A stand-in for `KVConnectorBase_V1`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, imported over the stand-ins."""
    base, logger = ModuleType(BASE), ModuleType("vllm.logger")
    base.__dict__.update(
        KVConnectorBase_V1=Base,
        KVConnectorMetadata=object,
        KVConnectorWorkerMetadata=object,
        KVConnectorRole=SimpleNamespace(WORKER="worker", SCHEDULER="scheduler"),
    )
    logger.__dict__["init_logger"] = logging.getLogger
    parts = BASE.split(".")
    for name in (".".join(parts[:count]) for count in range(1, len(parts))):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.distributed"].__dict__["get_tp_group"] = lambda: None
    monkeypatch.setitem(sys.modules, BASE, base)
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    monkeypatch.delitem(sys.modules, "kvtool.vllm.connector", raising=False)
    yield importlib.import_module("kvtool.vllm.connector")
    sys.modules.pop("kvtool.vllm.connector")


def connector_of(module: Any, role: str) -> Any:
    config = config_of()
    config.kv_transfer_config.kv_connector_extra_config = {"store": "none"}
    config.cache_config.block_size = 16
    config.scheduler_config.max_num_batched_tokens = 2048
    config.model_config = SimpleNamespace(max_model_len=2048)
    return module.KvtoolConnector(config, role, None)


def scheduled(**changes: Any) -> Any:
    """A step of vLLM with one new request."""
    own = {"req_id": "a", "prompt_token_ids": IDS, "block_ids": ([1, 2, 3, 4],), "num_computed_tokens": 0}
    new = SimpleNamespace(**own, **{"lora_request": None, "prompt_embeds": None, "mm_features": []} | changes)
    return SimpleNamespace(scheduled_new_reqs=[new], num_scheduled_tokens={"a": len(IDS)})


def heard(verdict: Any, invalid: Iterable[int] = ()) -> Any:
    return SimpleNamespace(kv_connector_worker_meta=verdict, invalid_block_ids={*invalid})


def test_prompts_are_compared_until_there_is_a_verdict_and_claimed_if_it_is_good(module: Any) -> None:
    request = SimpleNamespace(request_id="a", num_prompt_tokens=64)
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


def test_a_worker_reports_a_verdict_once_and_none_after_an_error(module: Any) -> None:
    connector = connector_of(module, "worker")
    connector.bind_connector_metadata(module.Step(comparison=object()))
    for answer, reported in ((ValueError("x"), None), (True, True), (False, False)):

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
