"""A server of vLLM in an environment of its own, asked over HTTP by token ids."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

_PATIENCE = 900  # seconds
_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
_OPTIONS = "--dtype float32 --enforce-eager --block-size 32 --max-model-len 1024 --no-async-scheduling"


class Server:
    def __init__(self, python: str, model: Path, store: Path, log: Path, *more: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        transfer = {"kv_connector": "KvtoolConnector", "kv_connector_module_path": "kvtool.vllm", "kv_role": "kv_both"}
        own = transfer | {"kv_connector_extra_config": {"store": str(store), "fusion": "epic"}}
        code = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *_OPTIONS.split()]
        code += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
        code += ["--kv-transfer-config", json.dumps(own), "--enable-prompt-tokens-details", *more]
        self._log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                code, env=os.environ | _SETTINGS, stdout=out, stderr=out, start_new_session=True
            )
        self.address = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.address, timeout=_PATIENCE)

    def __enter__(self) -> Server:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self._client.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.5)
        self.__exit__()
        raise AssertionError(self._log.read_text()[-4000:])

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._client.close()

    def ask(self, ids: list[int], max_tokens: int = 8, **more: Any) -> tuple[list[int], int]:
        """Answer a prompt; return the answer's tokens, and how many of the prompt's were not computed."""
        body = {"model": "tiny", "prompt": ids, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        reply = self._client.post("/v1/completions", json=body | {"max_tokens": max_tokens} | more)
        assert reply.status_code == 200, reply.text
        row = reply.json()
        details = row["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        return row["choices"][0]["token_ids"], details["cached_tokens"]

    def metrics(self) -> dict[str, float]:
        rows = (line.rpartition(" ") for line in self._client.get("/metrics").text.splitlines() if "kvtool" in line)
        return {
            name.partition("{")[0].removeprefix("vllm:kvtool_"): float(value)
            for name, _, value in rows
            if not name.startswith("#")
        }

    def kill_engine(self) -> None:
        own = self.process.pid
        pids = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        (engine,) = (pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(engine), signal.SIGKILL)
