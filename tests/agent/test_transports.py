"""`kvtool mcp` as a process of its own, asked by the library's own client over standard input and over HTTP."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import anyio
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.transport_security import TransportSecurityMiddleware
from starlette.requests import Request

from kvtool.core.agent.options import AgentOptions
from kvtool.core.agent.server import _security
from tests.cli.working import QUESTION, command, environment, kvtool

_LONG = 120  # seconds: other tests run at the same time
_READING = """
import sys
from pathlib import Path
import kvtool.cli.mcp, kvtool.core.agent.server
from kvtool.core.agent.tools import Tools
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
tools = Tools(Path(sys.argv[1]), ModelOptions(), QueryOptions(), (), lambda text, hint: None)
found = tools.search(sys.argv[2]).chunks[0]
assert tools.read(found.id).chunks and tools.status().documents and tools.text(found.source)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
_PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@contextmanager
def listening(*args: object) -> Iterator[str]:
    words = command("mcp", "--http", "--port", "0", *args)
    child = subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True, env=environment())
    with child:
        try:
            said = child.stderr.readline()
            assert said.startswith("listening to http://127.0.0.1:"), said + child.stderr.read()
            yield said.split()[2]
        finally:
            child.send_signal(signal.SIGTERM)
            code = child.wait(_LONG)
        assert code == 143
        assert child.stdout.read() == ""
        assert child.stderr.read() == "error: terminated\n"


@pytest.mark.slow
def test_over_standard_input_and_output(store: Path, tmp_path: Path) -> None:
    program, *words = command("mcp", "--store", store, "--max-tokens", "4")

    async def main() -> None:
        with (tmp_path / "err").open("w") as errors, anyio.fail_after(_LONG):
            server = StdioServerParameters(command=program, args=words, env=environment())
            async with Client(stdio_client(server, errlog=errors)) as client:
                found = await client.call_tool("search", {"question": QUESTION})
                assert found.structured_content is not None
                answer = await client.call_tool("answer", {"question": QUESTION})
                assert answer.structured_content is not None
                assert answer.structured_content["sources"]

    anyio.run(main)
    assert "Traceback" not in (tmp_path / "err").read_text()


@pytest.mark.slow
def test_over_http_with_the_key_and_for_no_page_of_another_host(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "key"

    async def main(url: str) -> None:
        key = {"Authorization": f"Bearer {path.read_text().strip()}"}
        with anyio.fail_after(_LONG):
            async with (
                httpx2.AsyncClient(headers=key) as http,
                Client(streamable_http_client(url, http_client=http)) as it,
            ):
                found = await it.call_tool("search", {"question": QUESTION})
                assert found.structured_content is not None
            async with httpx2.AsyncClient() as http:
                for headers, code in (
                    ({}, 401),
                    ({"Authorization": "Bearer x"}, 401),
                    ({"Authorization": "Bearer \xe9"}, 401),
                    ({**key, "Host": "evil.example"}, 421),
                ):
                    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                    assert (await http.post(url, json=_PING, headers=sent)).status_code == code

    with listening("--store", store, "--key-file", path) as url:
        anyio.run(main, url)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8322", "", 200),
        ("localhost", "http://localhost", 200),
        ("kv.example:8322", "https://kv.example", 200),
        ("evil.example", "", 421),
        ("kv.example.evil.example", "", 421),
        ("127.0.0.1:8322", "http://evil.example", 403),
    ],
)
def test_a_web_page_under_another_name_is_refused(host: str, origin: str, status: int) -> None:
    sent = {"host": host, "origin": origin, "content-type": "application/json"}
    headers = [(name.encode(), value.encode()) for name, value in sent.items() if value]
    check = TransportSecurityMiddleware(_security("127.0.0.1", AgentOptions(allow_host=("kv.example",))))
    request = Request({"type": "http", "method": "POST", "headers": headers})
    refusal = anyio.run(check.validate_request, request, True)
    assert (200 if refusal is None else refusal.status_code) == status


def test_an_agent_finds_and_reads_without_a_model(store: Path) -> None:
    """Clients wait for a server's first word: what takes seconds to import comes with the first answer."""
    words = [sys.executable, "-c", _READING, str(store), QUESTION]
    said = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=_LONG)
    assert said.stdout == "[]\n", said.stderr


def test_a_key_that_others_may_read_and_a_port_that_is_taken_are_refused(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("open")
    path.chmod(0o644)
    where = ("mcp", "--store", store, "--http", "--port", "0", "--key-file", path)
    kvtool(*where).failed(1, "others may read")
    path.unlink()
    kvtool(*where, "--host", "300.0.0.1").failed(2, "cannot listen to 300.0.0.1")


def test_what_cannot_be_started_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvtool("mcp", "--store", store, "--json").failed(2, "protocol's own")
    monkeypatch.setitem(sys.modules, "mcp", None)
    kvtool("mcp", "--store", store).failed(1, "kvtool[mcp]")
