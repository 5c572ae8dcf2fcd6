"""Ways of running vLLM that the connector does not serve are refused at the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtool.core.errors import UsageError
from kvtool.vllm.config import check_config


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
    ("name", "value", "what"),
    [
        ("pipeline_parallel_size", 2, "pipeline_parallel"),
        ("decode_context_parallel_size", 2, "decode_context_parallel"),
        ("distributed_executor_backend", "external_launcher", "external_launcher"),
        ("prefill_context_parallel_size", 2, "prefill_context_parallel"),
        ("cache_dtype", "fp8", "a cache of fp8"),
        ("async_scheduling", True, "asynchronous scheduling"),
        ("speculative_config", object(), "speculative decoding"),
        ("kv_connector", "MultiConnector", "within MultiConnector"),
    ],
)
def test_what_is_not_served_is_refused(name: str, value: object, what: str) -> None:
    check_config(config_of())
    with pytest.raises(UsageError, match=what):
        check_config(config_of(**{name: value}))
