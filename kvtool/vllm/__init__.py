"""KV connector of vLLM: `kv_connector_module_path` is `kvtool.vllm`, `kv_connector` is `KvtoolConnector`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the connector at its first use: without vLLM the rest can be imported."""
    if name != "KvtoolConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtool.vllm.connector import KvtoolConnector

    return KvtoolConnector
