"""Server of the Model Context Protocol, by its official library (modelcontextprotocol.io), over stdio or HTTP."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import socket
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import quote, unquote

import anyio
import anyio.from_thread
import anyio.to_thread
import mcp_types as types
import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.mcpserver.context import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from pydantic import AnyHttpUrl, ValidationError

from kvtool.core.agent.options import AgentOptions, key_of
from kvtool.core.agent.tools import Tools
from kvtool.core.common.validation import complaint_of
from kvtool.core.errors import KvtoolError, UsageError, replace_flags

LISTED = 1000  # documents on a page of the resources
_TEMPLATE = "kvtool://document/{source}"
_ABOUT = """\
A store of the user's own documents. `search` finds passages and `read` shows the chunks around one; `answer` lets a \
local model answer from them, which takes longer. Cite the `place` of what you use. Documents are resources: \
kvtool://document/ and the path, percent-encoded."""
_CONTEXT, _STREAM = "kvtool_context", "stream"  # parameters of a tool that clients do not see
_RESOURCE_NOT_FOUND = -32002  # until the protocol's revision that has no code of its own for it
_NO_CODE_OF_ITS_OWN = "2026-07-28"


class StoreServer:
    def __init__(self, tools: Tools) -> None:
        """Calls wait for a thread in the event loop: the library needs its own threads to read and write meanwhile."""
        self._store = tools
        self._reading, computing = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        reading = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
        readers = (tools.search, tools.read, tools.answer, tools.status)
        threads: dict[Callable[..., Any], anyio.CapacityLimiter] = {tools.answer: computing}
        self._tools = {each.__name__: _tool(each, reading, threads.get(each, self._reading)) for each in readers}
        if tools.roots:
            changing = types.ToolAnnotations(
                read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
            )
            self._tools["ingest"] = _tool(tools.ingest, changing, computing)

    async def list_tools(self, context: Any, params: Any) -> types.ListToolsResult:
        rows = [
            types.Tool(
                name=tool.name,
                description=tool.description,
                annotations=tool.annotations,
                input_schema=tool.parameters | {"additionalProperties": False},
                output_schema=tool.output_schema,
            )
            for tool in self._tools.values()
        ]
        return types.ListToolsResult(tools=rows)

    async def call_tool(
        self, context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        if (tool := self._tools.get(params.name)) is None:
            raise MCPError(types.INVALID_PARAMS, f"unknown tool: {params.name}")
        given = params.arguments or {}
        try:
            if unknown := given.keys() - tool.parameters["properties"].keys():
                raise ToolError(f"unknown argument: {min(unknown)!r}")
            result = await tool.run(given, Context(request_context=context), convert_result=True)
        except ToolError as error:
            text = str(error)
            if isinstance(cause := error.__cause__, ValidationError):
                text = complaint_of(cause).text
            return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
        assert isinstance(result, types.CallToolResult)
        return result

    async def list_documents(
        self, context: Any, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """A page's cursor is the last name, so no change of the store shifts a page."""
        cursor = None if params is None else params.cursor
        after = _name_of(cursor) if cursor is not None else ""
        try:
            sources = await anyio.to_thread.run_sync(self._store.sources, after, LISTED + 1, limiter=self._reading)
        except KvtoolError:  # no store yet
            sources = []
        page = sources[:LISTED]
        cursor = urlsafe_b64encode(page[-1].encode("utf-8", "surrogatepass")).decode() if sources[LISTED:] else None
        return types.ListResourcesResult(
            resources=[types.Resource(uri=uri_of(source), name=source, mime_type="text/plain") for source in page],
            next_cursor=cursor,
        )

    async def list_templates(self, context: Any, params: Any) -> types.ListResourceTemplatesResult:
        row = types.ResourceTemplate(name="document", uri_template=_TEMPLATE, description="The text of a document.")
        return types.ListResourceTemplatesResult(resource_templates=[row])

    async def read_document(
        self, context: ServerRequestContext[Any], params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        start, uri = _TEMPLATE.partition("{")[0], str(params.uri)
        try:
            if not uri.startswith(start):
                raise UsageError(f"{uri} is not in the store", "")
            name = unquote(uri.removeprefix(start))
            text = await anyio.to_thread.run_sync(self._store.text, name, limiter=self._reading)
        except KvtoolError as error:
            code = types.INVALID_PARAMS if context.protocol_version >= _NO_CODE_OF_ITS_OWN else _RESOURCE_NOT_FOUND
            raise MCPError(code, _words(error), {"uri": uri}) from error
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=params.uri, text=text, mime_type="text/plain")]
        )


def server_of(tools: Tools, version: str) -> Server[Any]:
    logging.getLogger("mcp").setLevel(logging.ERROR)
    own = StoreServer(tools)
    return Server(
        "kvtool",
        version=version,
        instructions=_ABOUT,
        on_list_tools=own.list_tools,
        on_call_tool=own.call_tool,
        on_list_resources=own.list_documents,
        on_list_resource_templates=own.list_templates,
        on_read_resource=own.read_document,
    )


def uri_of(source: str) -> str:
    return _TEMPLATE.replace("{source}", quote(source, safe=""))


def _name_of(cursor: str) -> str:
    try:
        if name := b64decode(cursor, b"-_", validate=True).decode("utf-8", "surrogatepass"):
            return name
    except ValueError:
        pass
    raise MCPError(types.INVALID_PARAMS, "this cursor is of no page", {"cursor": cursor})


def _tool(tool: Callable[..., Any], hints: types.ToolAnnotations, threads: anyio.CapacityLimiter) -> Tool:
    """Wrap a tool: the model reads the message and hint of an error, and a client sees the answer grow."""
    signature = inspect.signature(tool, eval_str=True)

    @functools.wraps(tool)
    async def call(kvtool_context: Context[Any], **arguments: Any) -> Any:
        count = itertools.count(1)

        def show(text: str) -> None:
            anyio.from_thread.check_cancelled()  # ends the answer of a cancelled request, or a client that has left
            if text:
                anyio.from_thread.run(kvtool_context.report_progress, next(count), None, text)

        if _STREAM in signature.parameters:
            arguments[_STREAM] = show
        try:
            return await anyio.to_thread.run_sync(functools.partial(tool, **arguments), limiter=threads)
        except KvtoolError as error:
            raise ToolError(_words(error)) from error

    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=Context[Any])
    seen = [each for name, each in signature.parameters.items() if name != _STREAM]
    call.__signature__ = signature.replace(parameters=[*seen, context])  # type: ignore[attr-defined]
    text = inspect.getdoc(tool)
    return Tool.from_function(call, description=text, annotations=hints, structured_output=True, context_kwarg=_CONTEXT)


def _words(error: KvtoolError) -> str:
    """Return an error as an agent reads it: without a hint at a command line, which it may not have."""
    hint = "" if "`kvtool" in error.hint or "--" in error.hint else error.hint
    return replace_flags(f"{error.message} ({hint})" if hint else error.message)


PATH = "/mcp"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_GRACE_S = 5  # for calls that run when the server is ended


def serve_stdio(tools: Tools, version: str) -> None:
    """Serve one client over stdin and stdout until it closes them. Other writers to stdout go to stderr meanwhile."""

    async def serve() -> None:
        server = server_of(tools, version)
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(serve)


def serve_http(
    tools: Tools, version: str, options: AgentOptions, keys: Sequence[str], show_url: Callable[[str], None]
) -> None:
    """Serve clients that send one of the keys, until a signal. Raises UsageError: the address cannot be listened to.

    Requests have to name this server, or one of `allow_host`, as their host: a web page could reach it by its own name.
    """
    with closing(_listening(options.host, options.port)) as listener:
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        app = server_of(tools, version).streamable_http_app(
            streamable_http_path=PATH,
            transport_security=_security(host, options),
            token_verifier=_Keys(keys),
            auth=AuthSettings(issuer_url=AnyHttpUrl(url), resource_server_url=None),
        )
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
        )
        show_url(url + PATH)
        uvicorn.Server(config).run(sockets=[listener])


class _Keys:
    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    async def verify_token(self, token: str) -> AccessToken | None:
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
