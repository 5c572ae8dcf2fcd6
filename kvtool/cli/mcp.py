"""`kvtool mcp`: the store as tools of an agent, by the Model Context Protocol."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from typing import TYPE_CHECKING

from kvtool.cli.options import Run, takes
from kvtool.core.agent.options import AgentOptions
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.plugins import extra_line
from kvtool.core.common.urls import is_loopback
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.core.agent.tools import Tools


@takes(
    AgentOptions,
    QueryOptions.some(*("top_k", "retriever", "embedder", "fusion", "ratio", "level", "set", "max_tokens", "system")),
    ModelOptions,
    StoreOptions,
    examples=("mcp --store notes", "mcp --root ~/notes", "mcp --http --port 8722"),
)
def mcp(run: Run) -> None:
    """Offer the store to AI agents: search, read, answer, status, ingest; over stdio or HTTP."""
    options = run.get(AgentOptions)
    if not options.http and not run.out.human:
        raise UsageError("standard output is the protocol's own", "leave --json and --jsonl out")
    if importlib.util.find_spec("mcp") is None:
        raise KvtoolError("the Model Context Protocol needs a package that is not there", extra_line("mcp"))
    from kvtool.core.agent.tools import Tools

    tools = Tools(
        run.get(StoreOptions).place, run.get(ModelOptions), run.get(QueryOptions), options.root, run.out.warning
    )
    with closing(tools):
        _serve(run, tools, options)


def _serve(run: Run, tools: Tools, options: AgentOptions) -> None:
    from kvtool import __version__
    from kvtool.core.agent.options import read_keys
    from kvtool.core.agent.server import serve_http, serve_stdio

    run.out.idle()
    if not options.http:
        serve_stdio(tools, __version__)
        return
    path = options.key_path
    keys = read_keys(path)
    if not is_loopback(options.host):
        run.out.warning(f"{options.host} may be reached by others, and the key travels as it is", "put TLS before it")

    def show_url(url: str) -> None:
        run.out.status(
            f"listening to {url} (Ctrl-C ends it); clients send `Authorization: Bearer` and the key in {path}"
        )

    serve_http(tools, __version__, options, keys, show_url)
