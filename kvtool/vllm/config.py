"""Configurations of vLLM that the connector supports."""

from __future__ import annotations

from typing import Any

from kvtool.core.errors import UsageError

_DTYPES = ("auto", "float16", "bfloat16", "float32")


def check_config(config: Any) -> None:
    parallel, dtype = config.parallel_config, config.cache_config.cache_dtype
    for name in ("pipeline_parallel", "prefill_context_parallel", "decode_context_parallel"):
        if getattr(parallel, f"{name}_size", 1) > 1:
            what = f"the kvtool connector does not support {name}_size"
            raise UsageError(what, "serve the model on one rank, or on tensor-parallel ones")
    # Each rank would have a scheduler of its own, and only the first one's would hear the gate's verdict.
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        raise UsageError("the kvtool connector does not support external_launcher", "start vLLM by vllm serve")
    if dtype not in _DTYPES:
        raise UsageError(f"the kvtool connector does not fill a cache of {dtype}", "leave --kv-cache-dtype out")
    # The next step would be scheduled, with a first token of nothing, before vLLM hears that a load has failed.
    if config.scheduler_config.async_scheduling:
        raise UsageError("the kvtool connector does not support asynchronous scheduling", "add --no-async-scheduling")
    if config.speculative_config is not None:
        what = "the kvtool connector does not support speculative decoding"
        raise UsageError(what, "leave --speculative-config out")
    # What to do after a failed load is read from the outermost connector's settings alone.
    if config.kv_transfer_config.kv_connector != "KvtoolConnector":
        outer = config.kv_transfer_config.kv_connector
        raise UsageError(f"the kvtool connector does not run within {outer}", "name it as kv_connector itself")
