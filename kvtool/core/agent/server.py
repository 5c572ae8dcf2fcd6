"""Server of the Model Context Protocol, by its official library (modelcontextprotocol.io), over stdio or HTTP."""

from __future__ import annotations

import functools
import inspect
import socket
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError
from mcp.server.mcpserver.resources import ResourceSecurity
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, ListResourcesResult, PaginatedRequestParams, Resource, ToolAnnotations
from pydantic import AnyHttpUrl

from kvtool.core.agent.options import AgentOptions, key_of
from kvtool.core.agent.tools import Tools
from kvtool.core.errors import KvtoolError, UsageError

LISTED = 1000  # documents on a page of the resources
_TEMPLATE = "kvtool://document/{source}"
_ABOUT = """\
A store of the user's own documents. `search` finds passages and `read` shows the chunks around one; `answer` lets a \
local model answer from them, which takes longer. Cite the `place` of what you use. Documents are resources: \
kvtool://document/ and the path, percent-encoded."""
F = TypeVar("F", bound=Callable[..., Any])


class StoreServer(MCPServer[Any]):
    """Server whose resources are the documents of the store at the time of a request."""

    def __init__(self, tools: Tools, version: str, **security: Any) -> None:
        super().__init__("kvtool", instructions=_ABOUT, version=version, log_level="ERROR", **security)
        self._tools = tools
        reading = ToolAnnotations(read_only_hint=True, open_world_hint=False)
        for tool in (tools.search, tools.read, tools.answer, tools.status):
            self._add(tool, reading)
        if tools.roots:
            changing = ToolAnnotations(
                read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
            )
            self._add(tools.ingest, changing)
        by_name = ResourceSecurity(exempt_params={"source"})  # a name in the store, never opened as a path
        # the library's own handler has no pages
        self._lowlevel_server.add_request_handler("resources/list", PaginatedRequestParams, self._listed)
        self.resource(_TEMPLATE, name="document", description="The text of a document.", security=by_name)(self._text)

    def _add(self, tool: Callable[..., Any], hints: ToolAnnotations) -> None:
        self.add_tool(_explained(tool), description=inspect.getdoc(tool), annotations=hints, structured_output=True)

    async def _listed(self, context: Any, params: PaginatedRequestParams) -> ListResourcesResult:
        """Return a page of documents by name. Its cursor is the last name, so no change of the store shifts a page."""
        after = _name_of(params.cursor) if params.cursor is not None else ""
        try:
            sources = await anyio.to_thread.run_sync(self._tools.sources, after, LISTED + 1)
        except KvtoolError:  # no store yet
            sources = []
        page = sources[:LISTED]
        return ListResourcesResult(
            resources=[Resource(uri=uri_of(source), name=source, mime_type="text/plain") for source in page],
            next_cursor=_cursor_of(page[-1]) if len(sources) > LISTED else None,
        )

    def _text(self, source: str) -> str:
        try:
            return self._tools.text(source)
        except KvtoolError as error:
            raise ResourceNotFoundError(_words(error)) from error


def uri_of(source: str) -> str:
    """Return the URI of a document."""
    return _TEMPLATE.replace("{source}", quote(source, safe=""))


def _cursor_of(source: str) -> str:
    return urlsafe_b64encode(source.encode("utf-8", "surrogatepass")).decode()


def _name_of(cursor: str) -> str:
    try:
        if name := b64decode(cursor, b"-_", validate=True).decode("utf-8", "surrogatepass"):
            return name
    except ValueError:
        pass
    raise MCPError(INVALID_PARAMS, "this cursor is of no page", {"cursor": cursor})


def _explained(tool: F) -> F:
    """Wrap a tool: the model reads the message and hint of an error."""

    @functools.wraps(tool)
    def call(**arguments: Any) -> Any:
        try:
            return tool(**arguments)
        except KvtoolError as error:
            raise ToolError(_words(error)) from error

    call.__signature__ = inspect.signature(tool, eval_str=True)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _words(error: KvtoolError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


PATH = "/mcp"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_GRACE_S = 5  # for calls that run when the server is ended


def serve_stdio(tools: Tools, version: str) -> None:
    """Serve one client over stdin and stdout until it closes them. Other writers to stdout go to stderr meanwhile."""
    anyio.run(StoreServer(tools, version).run_stdio_async)


def serve_http(
    tools: Tools, version: str, options: AgentOptions, keys: Sequence[str], show_url: Callable[[str], None]
) -> None:
    """Serve clients that send one of the keys, until a signal. `show_url` is called with the URL.

    Requests have to name this server as their host, or one of `allow_host`, so that no web page can reach it under a
    name of its own.

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
            token_verifier=_Keys(keys),
            auth=AuthSettings(issuer_url=AnyHttpUrl(url), resource_server_url=None),
        )
        app = server.streamable_http_app(streamable_http_path=PATH, transport_security=_security(host, options))
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
        )
        show_url(url + PATH)
        uvicorn.Server(config).run(sockets=[listener])


class _Keys:
    """Verifier of the keys that clients send."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    async def verify_token(self, token: str) -> AccessToken | None:
        """See `TokenVerifier` of the library."""
        return AccessToken(token=token, client_id="kvtool", scopes=[]) if key_of(token, self._keys) else None


def _security(host: str, options: AgentOptions) -> TransportSecuritySettings:
    names = [name for each in (*_LOOPBACK, host, *options.allow_host) for name in (each, f"{each}:*")]
    origins = [f"{scheme}://{name}" for name in names for scheme in ("http", "https")]
    return TransportSecuritySettings(allowed_hosts=names, allowed_origins=origins)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen to {host}, port {port}: {why}", "choose another --port or --host") from error
