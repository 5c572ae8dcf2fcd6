"""Transports of the tools: standard input and output, or streamable HTTP with a key."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable
from contextlib import closing

import anyio
import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import AnyHttpUrl

from kvtool.core.agent.options import AgentOptions
from kvtool.core.agent.server import StoreServer
from kvtool.core.agent.tools import Tools
from kvtool.core.errors import UsageError

PATH = "/mcp"
_HERE = ("127.0.0.1", "localhost", "[::1]")
_GRACE_S = 5  # for calls that run when the server is ended


def serve_stdio(tools: Tools, version: str) -> None:
    """Serve the one client at standard input and output, until it closes them.

    What else would write to standard output meanwhile, C libraries included, writes to standard error: the library
    keeps the descriptor for itself.
    """
    anyio.run(StoreServer(tools, version).run_stdio_async)


def serve_http(tools: Tools, version: str, options: AgentOptions, key: str, told: Callable[[str], None]) -> None:
    """Serve whoever sends the key, until a signal comes.

    Requests have to name this server as their host, or one of `allow_host`, so that no web page can reach it under a
    name of its own.

    Parameters
    ----------
    told : is given the URL once it is listened to.

    Raises
    ------
    UsageError : the address cannot be listened to.
    """
    with closing(_listening(options.host, options.port)) as listener:
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        server = StoreServer(
            tools,
            version,
            token_verifier=_Key(key),
            auth=AuthSettings(issuer_url=AnyHttpUrl(url), resource_server_url=None),
        )
        app = server.streamable_http_app(streamable_http_path=PATH, transport_security=_security(host, options))
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
        )
        told(url + PATH)
        uvicorn.Server(config).run(sockets=[listener])


class _Key:
    """Lets in who has the key; compared in constant time."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        """See `TokenVerifier` of the library."""
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._key):
            return None
        return AccessToken(token=token, client_id="kvtool", scopes=[])


def _security(host: str, options: AgentOptions) -> TransportSecuritySettings:
    names = [name for each in (*_HERE, host, *options.allow_host) for name in (each, f"{each}:*")]
    origins = [f"{scheme}://{name}" for name in names for scheme in ("http", "https")]
    return TransportSecuritySettings(allowed_hosts=names, allowed_origins=origins)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen to {host}, port {port}: {why}", "choose another --port or --host") from error
