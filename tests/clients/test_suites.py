"""Suites and clients of others against the server: `make test-clients` installs them in an environment of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from tests.serve.conftest import KEY, Served, ready, serving, wait_until

__all__ = ["ready"]
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PYTHON = os.environ.get("KVTOOL_TEST_CLIENTS", "")
PATIENCE = 400
# Scenarios of the MCP conformance suite of what the server declares: others need tools and prompts of its own server.
SCENARIOS = (
    *("server-initialize", "ping", "tools-list", "resources-list", "server-sse-multiple-streams"),
    "dns-rebinding-protection",
)
others = pytest.mark.skipif(not PYTHON, reason="`make test-clients` installs the clients of others")


def run(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    home = Path(PYTHON or sys.executable).parents[1]
    env = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=env, cwd=home, **more)


def rows_of(words: list[str], served: Served, *suites: str) -> list[dict[str, str]]:
    done = run([*words, served.url, KEY, "tiny", *suites])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def served(ready: Path) -> Iterator[Served]:
    with serving(ready, asking=QueryOptions(max_tokens=100)) as running:
        yield running


def expected(*suites: str) -> Counter[str]:
    page = (ROOT / "kvtool" / "docs" / "guide" / "server.md").read_text(encoding="utf-8")
    counts = {
        name.strip(): int(count) for name, count in re.findall(r"^\| ([^|]+) \| (\d+) of \2 \|", page, re.MULTILINE)
    }
    return Counter({name: counts[name] for name in suites})


def check(rows: list[dict[str, str]], *suites: str) -> None:
    assert [row for row in rows if row["reason"]] == []
    assert Counter(row["suite"] for row in rows) == expected(*suites)


@pytest.mark.slow
@others
def test_the_frameworks_of_python(served: Served) -> None:
    rows = rows_of([PYTHON, str(HERE / "suites.py")], served, "litellm", "langchain", "llama_index", "instructor")
    check(rows, "LiteLLM", "LangChain", "llama-index", "instructor")


@others
def test_the_sdks_of_node(served: Served) -> None:
    script = Path(PYTHON).parents[1] / "suites.mjs"  # which imports packages beside it
    script.write_bytes((HERE / "suites.mjs").read_bytes())
    suites = ("openai (Node)", "anthropic (Node)", "ollama (Node)", "ai (Vercel)")
    check(rows_of(["node", str(script)], served), *suites)


@others
def test_conformance_to_the_model_context_protocol(ready: Path) -> None:
    from kvtool.core.agent.server import server_of
    from kvtool.core.agent.tools import Tools

    with closing(Tools(ready, ModelOptions(), QueryOptions(), (), lambda text, hint: None)) as tools:
        app = server_of(tools, "test").streamable_http_app()
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            assert Counter({"MCP conformance": len(SCENARIOS)}) == expected("MCP conformance")
            for scenario in SCENARIOS:
                words = ["npx", "conformance", "server", "--url", f"http://127.0.0.1:{port}/mcp"]
                done = run([*words, "--scenario", scenario])
                assert done.returncode == 0, done.stdout
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.slow
def test_pydantic_ai(served: Served) -> None:
    pytest.importorskip("pydantic_ai")
    check(rows_of([sys.executable, str(HERE / "suites.py")], served, "pydantic_ai"), "pydantic-ai")
