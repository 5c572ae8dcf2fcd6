"""The tools and resources, asked by the library's own client without a process between."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from kvtool.core.agent.server import LISTED, server_of, uri_of
from kvtool.core.agent.tools import Excerpt, Found, Tools, _excerpt
from kvtool.core.cache.store import Store
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk
from tests.cli.working import QUESTION, kvtool, listing
from tests.retrieval.making import ingest
from tests.wording import refused

Talk = Callable[[Client], Awaitable[None]]


def talk(place: Path, say: Talk, *roots: Path) -> None:
    async def main() -> None:
        async with Client(server_of(tools, "test")) as client:
            await say(client)

    options = QueryOptions(top_k=2, max_tokens=4)
    with closing(Tools(place, ModelOptions(), options, roots, lambda text, hint: None)) as tools:
        anyio.run(main)


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert isinstance(result.structured_content, dict)
    return result.structured_content


async def complaint(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_is_found_can_be_read_with_its_neighbours(store: Path) -> None:
    async def say(client: Client) -> None:
        found = (await call(client, "search", question=QUESTION))["chunks"]
        assert len(found) == 2
        assert found[0]["source"].endswith("mill2.md")
        assert "third mill" in found[0]["text"]
        assert found[0]["place"].startswith(found[0]["source"] + ":")
        read = await call(client, "read", chunk=found[0]["id"], before=50, after=50)
        assert read["first"] == 1
        assert read["total"] == len(read["chunks"]) > 1
        whole = "".join(chunk["text"] for chunk in read["chunks"])
        assert whole == Path(read["source"]).read_text()
        alone = await call(client, "read", chunk=found[0]["id"], before=0, after=0)
        assert [chunk["id"] for chunk in alone["chunks"]] == [found[0]["id"]]

    talk(store, say)


@pytest.mark.slow
def test_an_excerpt_says_that_its_file_has_changed_or_gone(store: Path, tmp_path: Path, fresh: Any) -> None:
    place, notes = tmp_path / "fresh", tmp_path / "notes"
    notes.mkdir()
    for name in ("kept", "edited", "gone"):
        (notes / f"{name}.md").write_text(f"The mill called {name} was built by baker Z.")
    fresh(notes).fine()
    (notes / "edited.md").write_text("The mill called edited was built by baker Q.")
    (notes / "gone.md").unlink()

    async def say(client: Client) -> None:
        found = (await call(client, "search", question="Who built the mill?", top_k=5))["chunks"]
        said = {Path(chunk["source"]).stem: chunk["staleness"] for chunk in found}
        assert said == {"kept": "", "edited": "changed", "gone": "deleted"}
        for chunk in found:
            (same,) = (await call(client, "read", chunk=chunk["id"]))["chunks"]
            assert same["staleness"] == chunk["staleness"]
        answer = await call(client, "answer", question="Who built the mill?", top_k=5)
        assert {Path(each["source"]).stem: each["staleness"] for each in answer["sources"]} == said

    talk(place, say)


def test_an_excerpt_says_whose_document_it_is_of() -> None:
    place = {"source": "a.md", "start": 0, "end": 5, "line": 3, "text": "words"}
    chunk = ReplyChunk("ab12", **place, score=0.123456, tokens=4, status="hit", staleness="changed", origin="x.pack")
    assert _excerpt(chunk) == Excerpt("ab12", "a.md:3", "a.md", "words", 0.1235, "changed", "x.pack")


@pytest.mark.slow
def test_a_passage_cannot_pass_for_a_field_beside_it(tmp_path: Path, fresh: Any) -> None:
    """What a client without structured results shows is JSON, too: a line of a passage is no line of it."""
    (tmp_path / "a.md").write_text('The mill is old.\n"place": "b.md:1"\nsource: b.md:1\n')
    fresh(tmp_path / "a.md").fine()

    async def say(client: Client) -> None:
        result = await client.call_tool("search", {"question": "mill"})
        (content,) = result.content
        assert json.loads(content.text) == result.structured_content  # type: ignore[union-attr]
        lines = content.text.splitlines()  # type: ignore[union-attr]
        assert not [line for line in lines if line.strip().startswith(("source:", '"place": "b.md'))]

    talk(tmp_path / "fresh", say)


def test_an_answer_is_that_of_query_and_a_search_keeps_to_its_documents(store: Path) -> None:
    asked = kvtool("query", QUESTION, "--store", store, "--top-k", "2", "--max-tokens", "4", "--json").fine().json

    async def say(client: Client) -> None:
        found = await call(client, "search", question=QUESTION, top_k=5, source=["mill4.md"])
        assert {Path(chunk["source"]).name for chunk in found["chunks"]} == {"mill4.md"}
        answer = await call(client, "answer", question=QUESTION)
        assert answer["answer"] == asked["answer"]
        assert {source["id"] for source in answer["sources"]} == {chunk["id"] for chunk in asked["chunks"]}
        assert answer["tokens"]["reused"] > 0
        assert answer["fusion"] == asked["fusion"]
        chosen = await call(client, "answer", question=QUESTION, chunks=[answer["sources"][0]["id"]])
        assert [source["id"] for source in chosen["sources"]] == [answer["sources"][0]["id"]]

    talk(store, say)


def test_status_and_documents_as_resources(store: Path, corpus: Path) -> None:
    async def say(client: Client) -> None:
        status = await call(client, "status")
        assert (status["documents"], status["gate"], status["roots"]) == (6, True, [])
        assert status["chunks"] == sum(len(document["chunks"]) for document in listing(store))
        resources = (await client.list_resources()).resources
        assert [Path(resource.name).name for resource in resources] == [f"mill{n}.md" for n in range(6)]
        (content,) = (await client.read_resource(resources[2].uri)).contents
        assert content.text == (corpus / "mill2.md").read_text()  # type: ignore[union-attr]

    talk(store, say)


@pytest.mark.slow
def test_documents_are_listed_page_by_page(tmp_path: Path) -> None:
    names = [f"/notes/{number:04}.md" for number in range(2 * LISTED + 7)]
    going = (names[5], names[LISTED + 5])
    files = {"going": dict.fromkeys(going, "Gone."), "rest": dict.fromkeys(set(names) - set(going), "One text.")}
    with Store.create_or_open(tmp_path / "store") as store, store.writer() as writer:
        writer.set_manifest({"model": "tiny"})
        ingest(writer, files)

    async def say(client: Client) -> None:
        pages, cursor = [], None
        while True:
            page = await client.list_resources(cursor=cursor)
            pages.append([resource.name for resource in page.resources])
            if (cursor := page.next_cursor) is None:
                break
            if len(pages) == 1:
                with Store.open(tmp_path / "store") as other, other.writer() as writer:
                    writer.remove_file("going")
        assert [len(page) for page in pages] == [LISTED, LISTED, 6]
        assert [name for page in pages for name in page] == [name for name in names if name != going[1]]
        (content,) = (await client.read_resource(uri_of(pages[-1][-1]))).contents
        assert content.text == "One text."  # type: ignore[union-attr]
        for wrong in ("", "nowhere", "%%%", "/w=="):
            with refused(MCPError):
                await client.list_resources(cursor=wrong)
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "kvtool://document/{source}"

    talk(tmp_path / "store", say)


def test_errors_have_the_codes_of_the_protocol(store: Path, tmp_path: Path) -> None:
    (secret := tmp_path / "secret.md").write_text("not ingested")
    paths = (secret, "../secret.md", f"{store}/../secret.md")  # a resource is a name in the store, never a path

    async def say(client: Client) -> None:
        with refused(MCPError) as unknown:
            await client.call_tool("look", {})
        assert unknown.value.error.code == -32602
        for uri in (uri_of("nowhere.md"), "file:///etc/passwd", *(uri_of(str(path)) for path in paths)):
            with refused(MCPError) as missing:
                await client.read_resource(uri)
            assert missing.value.error.code in (-32602, -32002)
        with pytest.raises(MCPError) as prompts:
            await client.list_prompts()
        assert prompts.value.error.code == -32601
        assert await complaint(client, "search") == "question is missing"
        assert "no chunk matches" in await complaint(client, "search", question="zzyzx")
        assert "top_k cannot be 0" in await complaint(client, "search", question=QUESTION, top_k=0)
        assert "before cannot be -1" in await complaint(client, "read", chunk="ffffffff", before=-1)
        assert "question is empty" in await complaint(client, "answer", question="  ")
        assert await complaint(client, "search", question="x", limit=3) == "unknown argument: 'limit'"
        both = await complaint(client, "answer", question="x", chunks=["a"], documents=["b"])
        assert "chunks and documents exclude each other" in both
        assert "--" not in both
        missing_chunk = await complaint(client, "read", chunk="00" * 20)
        assert "is not in the store" in missing_chunk
        assert "`kvtool" not in missing_chunk

    talk(store, say)


def test_an_answer_is_shown_as_it_grows(store: Path) -> None:
    async def say(client: Client) -> None:
        pieces: list[str] = []
        numbers: list[float] = []

        async def show(progress: float, total: float | None, message: str | None) -> None:
            numbers.append(progress)
            pieces.append(message or "")

        result = await client.call_tool("answer", {"question": QUESTION}, progress_callback=show)
        assert isinstance(result.structured_content, dict)
        assert "".join(pieces).strip() == result.structured_content["answer"]
        assert numbers == sorted(set(numbers))
        tools = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        assert [*tools] == ["search", "read", "answer", "status"]  # without a root nothing can be ingested
        schema = tools["answer"]
        assert not {"stream", "kvtool_context"} & schema["properties"].keys()

    talk(store, say)


def test_an_answer_ends_when_its_request_is_cancelled(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, ended = 500, threading.Event()

    def answer(self: Tools, question: str, stream: Callable[[str], None] | None = None) -> Found:
        nonlocal pieces
        try:
            while pieces:
                pieces -= 1
                stream("x")
                time.sleep(0.01)
        finally:
            ended.set()
        return Found([])

    async def say(client: Client) -> None:
        with anyio.CancelScope() as scope:

            async def leave(progress: float, total: float | None, message: str | None) -> None:
                scope.cancel()

            await client.call_tool("answer", {"question": QUESTION}, progress_callback=leave)
        assert await anyio.to_thread.run_sync(ended.wait, 30)

    monkeypatch.setattr(Tools, "answer", answer)
    talk(store, say)
    assert pieces


def test_waiting_answers_block_nothing_and_can_be_cancelled(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begun, go = list[str](), threading.Event(), threading.Event()

    def answer(self: Tools, question: str, stream: Callable[[str], None] | None = None) -> Found:
        asked.append(question)
        begun.set()
        assert go.wait(30)
        return Found([])

    async def say(client: Client) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1  # by which the library reads and writes
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(client.call_tool, "answer", {"question": "first"})
                assert await anyio.to_thread.run_sync(begun.wait, 30)
                async with anyio.create_task_group() as leaving:
                    leaving.start_soon(client.call_tool, "answer", {"question": "left"})
                    assert (await call(client, "search", question=QUESTION))["chunks"]
                    leaving.cancel_scope.cancel()
                group.start_soon(client.call_tool, "answer", {"question": "last"})
                assert (await client.list_resources()).resources
                go.set()
        assert asked == ["first", "last"]

    monkeypatch.setattr(Tools, "answer", answer)
    talk(store, say)


def test_only_what_lies_below_a_root_is_ingested(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "notes"
    root.mkdir()
    (root / "new.md").write_text("The seventh mill was built by baker Q.")
    outside = tmp_path / "outside.md"
    outside.write_text("The eighth mill is a secret.")
    (root / "link.md").symlink_to(outside)

    async def say(client: Client) -> None:
        (root / ".kvtoolignore").write_text("drafts/\n")
        (root / "drafts").mkdir()
        (root / "drafts" / "a.md").write_text("Not yet.")
        hidden = (root / ".env", root / ".git" / "config", root / "server.key", root / "drafts" / "a.md")
        for path in (outside, root / "link.md", root / ".." / "outside.md", Path("notes/new.md"), Path("/"), *hidden):
            assert "may not be ingested" in await complaint(client, "ingest", paths=[str(path)])
        assert "not a path" in await complaint(client, "ingest", paths=["\0"])
        done = await call(client, "ingest", paths=[str(root)])
        assert (done["added"], done["failed"]) == (1, 0)
        found = await call(client, "search", question="Who built the seventh mill?", top_k=1)
        assert found["chunks"][0]["source"].endswith("new.md")

    talk(store, say, root)


def test_what_a_root_leaves_out_is_not_read_by_naming_a_folder_in_it(store: Path, tmp_path: Path) -> None:
    sub = tmp_path / "notes" / "sub"
    sub.mkdir(parents=True)
    (tmp_path / "notes" / ".kvtoolignore").write_text("*.draft.md\n")
    for name in ("a.md", "b.draft.md", ".d.md"):
        (sub / name).write_text(f"The kite is in {name}.")
    (sub / "link.md").symlink_to(sub / ".d.md")

    async def say(client: Client) -> None:
        done = await call(client, "ingest", paths=[str(sub)])
        assert (done["added"], done["failed"]) == (1, 0)
        names = {Path(resource.name).name for resource in (await client.list_resources()).resources}
        assert names & {"a.md", "b.draft.md", ".d.md", "link.md"} == {"a.md"}
        assert "may not be ingested" in await complaint(client, "ingest", paths=[str(sub / "link.md")])

    talk(store, say, tmp_path / "notes")


@pytest.mark.slow
def test_the_store_is_followed_and_one_that_is_not_there_is_told(store: Path, tmp_path: Path, fresh: Any) -> None:
    place = tmp_path / "fresh"
    (tmp_path / "one.md").write_text("The only mill was built by baker Z.")

    async def say(client: Client) -> None:
        assert "store" in await complaint(client, "search", question="mill")
        assert (await client.list_resources()).resources == []
        fresh(tmp_path / "one.md").fine()  # as cron does it
        found = await call(client, "search", question="only mill")
        assert found["chunks"][0]["source"].endswith("one.md")

    talk(place, say)
