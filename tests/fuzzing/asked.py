"""What clients, agents and files of settings say: bodies of requests, arguments of tools, journals, TOML, keys."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from starlette.requests import Request

from kvtool.cli.options import SETTINGS
from kvtool.core.agent.key import read_key
from kvtool.core.agent.server import StoreServer
from kvtool.core.agent.tools import Tools
from kvtool.core.cache.store import Store
from kvtool.core.corpus.ignoring import Rules
from kvtool.core.errors import KvtoolError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.resolve import PROJECT_FILE, resolve
from kvtool.core.query.asked import read_asked
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import read_batch
from kvtool.core.retrieval.finder import Finder
from kvtool.lab.measure.journal import Journal
from kvtool.serve.asking import read_chat, read_completion
from kvtool.serve.documents import Documents
from kvtool.serve.embeddings import Embeddings
from kvtool.serve.wire import Refusal, body_of
from tests.cache.making import id_of, make_store
from tests.fuzzing.harness import refused, scratch


class _Engine:
    """Nothing behind the parsing: every question that gets so far is refused."""

    embedder_name = "some/embedder"

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: Any) -> Any:
            raise KvtoolError(f"{name} is not tried here")

        return refuse


@functools.cache
def _place() -> Path:
    return scratch("asked")


@functools.cache
def _store() -> Path:
    return make_store(_place() / "store")


def _file(name: str, data: bytes) -> Path:
    path = _place() / name
    path.write_bytes(data)
    path.chmod(0o600)
    return path


# ---- bodies of requests ------------------------------------------------------------------------------------------


def _request(data: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers, "query_string": b"all=true"}, receive)


def _ended(work: Coroutine[Any, Any, Any]) -> None:
    with refused(Refusal):
        asyncio.run(work)


def bodies(data: bytes) -> None:
    """A body of a chat, of a completion, of embeddings, of documents."""

    async def asked() -> None:
        value = await body_of(_request(data))
        for read in (read_chat, read_completion):
            with refused(Refusal):
                read(value, QueryOptions())

    engine: Any = _Engine()
    documents = Documents(engine, IngestOptions(paths=()), (_place() / "root",), _place() / "uploads")
    _ended(asked())
    _ended(Embeddings(engine).embed(_request(data)))
    _ended(documents.add(_request(data)))
    uploads = _place() / "uploads"
    assert not uploads.is_dir() or {path.name for path in _place().iterdir()} <= _ours()


def _ours() -> set[str]:
    return {"uploads", "root", "store", "asked.jsonl", "batch.jsonl", "journal.jsonl", "rules", "config.toml", "key"}


# ---- tools of an agent -------------------------------------------------------------------------------------------


def tools(data: bytes) -> None:
    """Arguments of every tool, and the cursor of a list."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            anyio.run(_call, value)


async def _call(value: dict[str, Any]) -> None:
    made = Tools(_store(), ModelOptions(), QueryOptions(top_k=2), [_place() / "root"], lambda text, hint: None)
    with contextlib.closing(made):
        async with Client(StoreServer(made, "test")) as client:
            for name in ("search", "read", "status", "ingest"):
                if name == "ingest" and not value.get("paths"):
                    continue
                result = await client.call_tool(name, value)
                assert not result.is_error or "Traceback" not in str(result.content)
            with contextlib.suppress(MCPError):
                await client.list_resources(cursor=str(value.get("question")))


# ---- files -------------------------------------------------------------------------------------------------------


def journal(data: bytes) -> None:
    """What `store warm --from` takes: questions, answers, lines of a log."""
    path = _file("asked.jsonl", data)
    with refused(), Store.open(_store()) as store:
        read_asked(path, store, Finder(store, lambda text, hint: None), QueryOptions(), time.time())


def questions(data: bytes) -> None:
    """questions.jsonl of `--batch` and `eval`, and the journal of a report that is resumed."""
    with refused():
        read_batch(_file("batch.jsonl", data))
    with refused():
        Journal(_file("journal.jsonl", data), {"model": "tiny"})


def settings(data: bytes) -> None:
    """kvtool.toml of a working folder, and the user's own."""
    folder = _place() / "rules"
    folder.mkdir(exist_ok=True)
    (folder / PROJECT_FILE).write_bytes(data)
    (folder / ".kvtoolignore").write_bytes(data)
    nothing = _file("config.toml", b"")
    with refused():
        resolve(SETTINGS, config=nothing, environ={}, folder=folder)
    (folder / PROJECT_FILE).unlink()
    with refused():
        resolve(SETTINGS, config=_file("config.toml", data), environ={}, folder=folder)
    with refused():
        for name in ("a", "b.md", "src/x"):
            Rules.above(folder).below(folder).names(folder / name, False)


def key_file(data: bytes) -> None:
    """The file of a server's key."""
    with refused():
        key = read_key(_file("key", data))
        assert key
        assert key.isascii()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "bodies": bodies,
    "tools": tools,
    "journal": journal,
    "questions": questions,
    "settings": settings,
    "key_file": key_file,
}


def _json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def _bodies() -> list[bytes]:
    user = {"role": "user", "content": [{"type": "text", "text": "Who?"}]}
    messages = [{"role": "system", "content": "Be brief."}, user]
    return _json(
        {"messages": messages, "temperature": 0, "seed": 1, "stream": True, "stop": ["x"], "kvtool": {"top_k": 2}},
        {"messages": [*messages, {"role": "assistant", "content": "A."}, messages[1]], "max_tokens": 4, "user": "u"},
        {"prompt": "Who?", "model": "kvtool", "stream_options": {"include_usage": True}, "n": 1},
        {"input": ["a", "b"], "model": "some/embedder", "encoding_format": "base64"},
        {"documents": [{"name": "notes/a.md", "text": "A mill."}], "paths": []},
    )


def _tools() -> list[bytes]:
    chunk = id_of("f0.0").hex()
    return _json({"question": "f0.0", "top_k": 3, "only": ["f*"], "chunk": chunk, "before": 1, "paths": ["/x"]})


def _lines() -> list[bytes]:
    chunk = id_of("f0.0").hex()
    rows = ({"question": "f0.0?", "time": 1.7e9}, {"chunks": [{"id": chunk}], "time": "2026-01-01T00:00:00Z"})
    return [b"\n".join(_json(*rows)), *_json({"question": "Who?", "id": 1, "answers": ["a"], "chunks": []})]


def _toml() -> list[bytes]:
    return [b'store = "x"\ntop_k = 3\n[ingest]\nchunk_tokens = 128\nexclude = ["*.log"]\n[query]\nlevel = "auto"\n']


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "bodies": _bodies,
    "tools": _tools,
    "journal": _lines,
    "questions": lambda: [*_lines(), b'{"type": "kvtool inspect quality", "facts": {"model": "tiny"}}\n' * 2],
    "settings": _toml,
    "key_file": lambda: [b"kv-0123456789\n"],
}
