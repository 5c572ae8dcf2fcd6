"""The tools and resources of the Model Context Protocol, by its official library (modelcontextprotocol.io)."""

from __future__ import annotations

import functools
import inspect
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError
from mcp.server.mcpserver.resources import ResourceSecurity
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, ListResourcesResult, PaginatedRequestParams, Resource, ToolAnnotations

from kvtool.core.agent.tools import Tools
from kvtool.core.errors import KvtoolError

LISTED = 1000  # documents on a page of the resources
_TEMPLATE = "kvtool://document/{source}"
_ABOUT = """\
A store of the user's own documents. `search` finds passages and `read` shows what stands around one; `answer` lets a \
local model answer from them, which takes longer. Cite the `place` of what you use. Documents are resources: \
kvtool://document/ and the path, percent-encoded."""
F = TypeVar("F", bound=Callable[..., Any])


class StoreServer(MCPServer[Any]):
    """A server whose resources are the documents that the store holds when it is asked."""

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
        # the library's own handler knows no pages
        self._lowlevel_server.add_request_handler("resources/list", PaginatedRequestParams, self._listed)
        self.resource(_TEMPLATE, name="document", description="The text of a document.", security=by_name)(self._text)

    def _add(self, tool: Callable[..., Any], hints: ToolAnnotations) -> None:
        self.add_tool(_explained(tool), description=inspect.getdoc(tool), annotations=hints, structured_output=True)

    async def _listed(self, context: Any, params: PaginatedRequestParams) -> ListResourcesResult:
        """A page of the documents by name. Its cursor is the last name: what comes or goes meanwhile shifts no page."""
        after = _name_of(params.cursor) if params.cursor is not None else ""
        try:
            sources = await anyio.to_thread.run_sync(self._tools.shelf.sources, after, LISTED + 1)
        except KvtoolError:  # no store yet
            sources = []
        page = sources[:LISTED]
        return ListResourcesResult(
            resources=[Resource(uri=uri_of(source), name=source, mime_type="text/plain") for source in page],
            next_cursor=_cursor_of(page[-1]) if len(sources) > LISTED else None,
        )

    def _text(self, source: str) -> str:
        try:
            return self._tools.shelf.text(source)
        except KvtoolError as error:
            raise ResourceNotFoundError(_words(error)) from error


def uri_of(source: str) -> str:
    """The URI of a document."""
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
    """A tool whose errors reach the model in words, so that it can do better."""

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
