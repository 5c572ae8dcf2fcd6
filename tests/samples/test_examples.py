"""The examples at the top of `samples/`: each is run, on a tiny model, and is short enough to be read at once."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import anyio
import pytest

from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, command, environment, kvtool
from tests.remote.serving import s3_server, s3_url

__all__ = ["s3_server", "s3_url"]
SAMPLES = Path(__file__).resolve().parents[2] / "samples"
READ = 30  # seconds that a program may take to answer


def example(name: str) -> ModuleType:
    """The module of `samples/NAME.py`."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", SAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where pydantic looks types up
    spec.loader.exec_module(module)
    return module


def test_quickstart(corpus: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("quickstart").main(corpus / "mill2.md", QUESTION, tmp_path / "store", str(tiny))
    said = capsys.readouterr().out
    assert said.startswith(QUESTION)
    assert re.search(r"^  hit +\S+mill2\.md:\d+$", said, re.MULTILINE)
    assert re.search(r"^[1-9]\d* of \d+ tokens reused; first token after \d+ ms$", said, re.MULTILINE)


def test_python_api(tiny: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("python_api").main(tmp_path / "store", corpus, QUESTION, str(tiny))
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said if " tokens computed " in line] == ["full", "reuse", "epic", "union"]
    assert re.search(r"second turn: [1-9]\d* tokens kept", "\n".join(said))
    assert "compressed: ['2']" in said
    assert any(line.startswith("removed: ") and "mill0.md" in line for line in said)
    assert "ratio" in said[-1]
    assert "; " in said[-1]  # the hint


def test_openai_client(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    from tests.serve.conftest import KEY, serving

    with serving(store) as served:
        example("openai_client").main(QUESTION, f"{served.url}/v1", KEY)
    answer, *lines = capsys.readouterr().out.splitlines()
    assert answer
    assert any(line.endswith("mill2.md:1") for line in lines)
    assert re.fullmatch(r"[1-9]\d* tokens reused, first token after \d+ ms", lines[-1])


@pytest.mark.parametrize(
    ("name", "library"),
    [("langchain_rag", "langchain_core"), ("llamaindex_rag", "llama_index.core"), ("haystack_rag", "haystack")],
)
def test_rag(
    name: str, library: str, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    pytest.importorskip(library)
    example(name).main(store, QUESTION, max_tokens=4)
    assert "mill2.md:1" in capsys.readouterr().out


@pytest.mark.slow
def test_langchain_chat(store: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_openai")
    from tests.serve.conftest import KEY, serving, wait_until
    from tests.serve.test_learning import ARNE, BRIX

    folder = corpus.with_name("harbours")
    folder.mkdir()
    (folder / "harbours.md").write_text(f"{ARNE}\n\n{BRIX}\n\nshort", encoding="utf-8")
    with serving(store, learn=True) as served:
        for _ in range(2):
            example("langchain_chat").main(folder, "Who keeps a diary in Arne?", f"{served.url}/v1", KEY, 2)
            wait_until(lambda: not served.engine.scheduler.learning)
        assert served.warnings == []
    told = [re.fullmatch(r"   (\d+) of (\d+) tokens reused", line) for line in capsys.readouterr().out.splitlines()]
    first, *_, last = [(int(one[1]), int(one[2])) for one in told if one]
    assert first == (0, last[1])
    assert last[0] > 0.5 * last[1]


def test_langchain_retriever(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_core.retrievers")
    from tests.serve.conftest import KEY, serving

    found = kvtool("search", QUESTION, "--source", "*mill1.md", "--top-k", 1, "--store", store, "--json").fine().json
    retriever = example("langchain_retriever")
    with serving(store) as served:
        url, options = f"{served.url}/v1", {"source": "*mill1.md", "top_k": 1}
        retriever.main(QUESTION, url, KEY)
        asked = retriever.KvtoolRetriever(url=url, key=KEY, options=options).invoke(QUESTION)
    assert [(each.id, each.page_content) for each in asked] == [(one["id"], one["text"]) for one in found["chunks"]]
    assert re.match(r"\d\.\d\d  \S+mill2\.md:\d+\n", capsys.readouterr().out)


def test_mcp_configuration(store: Path, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    (server,) = json.loads((SAMPLES / "mcp.json").read_text())["mcpServers"].values()
    assert server["command"] == "kvtool"
    here = {"/home/me/store": store, "/home/me/notes": corpus}
    program, *words = command(*(here.get(word, word) for word in server["args"]))

    async def search() -> set[str]:
        with (tmp_path / "err").open("w") as errors, anyio.fail_after(4 * READ):
            started = StdioServerParameters(command=program, args=words, env=environment())
            async with Client(stdio_client(started, errlog=errors)) as client:
                found = await client.call_tool("search", {"question": QUESTION})
                assert "mill2.md" in str(found.structured_content)
                return {tool.name for tool in (await client.list_tools()).tools}

    assert anyio.run(search) >= {"search", "read", "answer", "status", "ingest"}


def test_sharing_over_s3(
    s3_url: str, tiny: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("documents").symlink_to(corpus, target_is_directory=True)
    page = (SAMPLES / "share_over_s3.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^    kvtool (.+)$", page, re.MULTILINE)]
    assert [words[0] for words in commands] == ["ingest", "store", "query", "store", "query"]
    here = {"s3://bucket/team/kv": s3_url, "smollm2": str(tiny), "Who founded the observatory?": QUESTION}
    more = {"ingest": (*CHUNKS, *PREFIX), "query": SHORT}
    for words in commands:
        kvtool(*(here.get(word, word) for word in words), *more.get(words[0], ())).fine()
