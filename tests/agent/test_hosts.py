"""Requests to the agent's server over HTTP name that server as their host, or a name that its owner allows."""

from __future__ import annotations

import anyio
import pytest
from mcp.server.transport_security import TransportSecurityMiddleware
from starlette.requests import Request

from kvtool.core.agent.options import AgentOptions
from kvtool.core.agent.server import _security


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
