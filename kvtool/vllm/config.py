"""Configurations of vLLM that the connector supports."""

from __future__ import annotations

from typing import Any

from kvtool.core.errors import UsageError

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
