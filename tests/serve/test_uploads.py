"""Files of the uploads folder: a client reaches those that clients have sent, and no other; also with a size budget."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kvtool
from kvtool.cli.options import SETTINGS, Run
from kvtool.cli.out import Out
from kvtool.cli.serve import _ingesting
from kvtool.core.cache.store import Store
from kvtool.core.options.option import options_of
from kvtool.core.options.resolve import resolve
from kvtool.core.query.options import QueryOptions
from kvtool.core.upkeep.forget import pin
from tests.cli.working import QUESTION
from tests.serve.conftest import Served, serving

DOCUMENTS = "/v1/documents"
ROWS = '{"id": "r1", "text": "The kite is in Oslo."}\n{"id": "r2", "text": "The mill is in Bergen."}\n'
MBOX = "From a@b Thu Jan  1 00:00:00 2026\nSubject: One\n\nThe kite is in Oslo.\n\n"


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    folder = tmp_path / "sent"
    folder.mkdir()
    return folder


@pytest.fixture
def served(store: Path, uploads: Path) -> Iterator[Served]:
    with serving(store, uploads=uploads) as served:
        yield served


def send(client: httpx2.Client, name: str, text: str) -> httpx2.Response:
    return client.post(DOCUMENTS, json={"documents": [{"name": name, "text": text}]})


def forget(client: httpx2.Client, source: str | Path, **more: str) -> httpx2.Response:
    return client.delete(DOCUMENTS, params={"source": str(source), **more})


def refused(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def own(store: Path, path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with kvtool.open(store) as cache:
        cache.ingest(path)
    return path


def sources(client: httpx2.Client) -> set[str]:
    return {row["source"] for row in client.get(DOCUMENTS).json()["data"]}


def test_a_path_that_leaves_the_folder_is_not_unlinked(store: Path, uploads: Path, client: httpx2.Client) -> None:
    outside, foreign = uploads.parent / "outside.md", f"{uploads}/../outside.md"
    outside.write_text("The kite is in Oslo.")
    with Store.open(store) as opened, opened.writer() as writer:
        entry = next(opened.files())
        document = opened.document(entry.path)
        assert document is not None
        writer.commit_file(replace(entry, path=foreign, documents=(foreign,)), [replace(document, source=foreign)])
    answer = forget(client, foreign)
    assert answer.json()["deleted"] == [foreign], answer.text
    assert outside.read_text() == "The kite is in Oslo."


def test_a_file_that_no_client_sent_is_left_alone(store: Path, uploads: Path, client: httpx2.Client) -> None:
    mine = own(store, uploads / "mine.md", "The kite is in Oslo.")
    assert "no client has sent" in refused(forget(client, mine), 403)
    assert "no client has sent" in refused(send(client, "mine.md", "Nothing."), 403)
    assert "no client has sent" in refused(send(client, "mine.md", mine.read_text()), 403)  # nor is it made a client's
    assert "no client has sent" in refused(forget(client, "*", all="true"), 403)
    assert mine.read_text() == "The kite is in Oslo."
    assert str(mine) in sources(client)


def test_of_several_documents_none_is_kept_where_one_is_refused(uploads: Path, client: httpx2.Client) -> None:
    (uploads / "mine.md").write_text("mine")
    rows = [{"name": "new.md", "text": "new"}, {"name": "mine.md", "text": "theirs"}]
    refused(client.post(DOCUMENTS, json={"documents": rows}), 403)
    assert not (uploads / "new.md").exists()


def test_a_file_called_like_a_row_is_not_the_row(store: Path, uploads: Path, client: httpx2.Client) -> None:
    namesake = uploads / "rows.jsonl#r1"
    namesake.write_text("A file of the owner's.")
    assert send(client, "rows.jsonl", ROWS).json()["documents"]["added"] == 2
    assert forget(client, uploads / "rows.jsonl").status_code == 200
    assert namesake.read_text() == "A file of the owner's."
    for name in ("rows.jsonl#r1", "rows.jsonl#a/b.md", "post.mbox#1"):
        assert "no name" in refused(send(client, name, "In the place of a row."), 400)


@pytest.mark.parametrize(("name", "text"), [("rows.jsonl", ROWS), ("post.mbox", MBOX + MBOX.replace("One", "Two"))])
def test_a_part_of_a_file_that_was_sent_goes_with_all_of_it(
    store: Path, uploads: Path, client: httpx2.Client, name: str, text: str
) -> None:
    """Else the next ingest of the folder would bring the text back."""
    before, file = sources(client), uploads / name
    send(client, name, text)
    one, other = sorted(sources(client) - before)
    assert str(file) in refused(forget(client, one), 409)
    assert {one, other} <= sources(client)
    assert sorted(forget(client, file).json()["deleted"]) == [one, other]
    assert not file.exists()
    with kvtool.open(store) as cache:
        (uploads / "else.md").write_text("Nothing to see.")
        cache.ingest(uploads)
    assert sources(client) == before | {str(uploads / "else.md")}


def test_what_the_owner_has_edited_since_is_the_owners(uploads: Path, client: httpx2.Client) -> None:
    send(client, "notes/a.md", "The kite is in Oslo.")
    file = uploads / "notes" / "a.md"
    file.write_text("The kite is in Bergen.")
    assert "changed" in refused(forget(client, file), 403)
    assert "changed" in refused(send(client, "notes/a.md", "The kite is lost."), 403)
    assert file.read_text() == "The kite is in Bergen."
    file.write_text("The kite is in Oslo.")
    assert send(client, "notes/a.md", "The kite is lost.").json()["documents"]["changed"] == 1
    assert file.read_text() == "The kite is lost."


def test_what_was_sent_is_known_after_a_restart(store: Path, uploads: Path) -> None:
    with serving(store, uploads=uploads) as served, served.client as client:
        send(client, "a.md", "The kite is in Oslo.")
    with serving(store, uploads=uploads) as served, served.client as client:
        assert send(client, "a.md", "The kite is in Bergen.").json()["documents"]["changed"] == 1
        assert forget(client, uploads / "a.md").status_code == 200
    assert not (uploads / "a.md").exists()


def test_what_is_refused_leaves_no_file(uploads: Path, client: httpx2.Client) -> None:
    file = uploads / "a.md"
    assert "empty" in refused(send(client, "a.md", " "), 400)
    assert not file.exists()
    send(client, "a.md", "The kite is in Oslo.")
    rows = [{"name": name, "text": text} for name, text in (("a.md", " "), ("b.md", "The mill is in Bergen."))]
    report = client.post(DOCUMENTS, json={"documents": rows}).json()
    assert report["documents"]["added"] == 1
    assert file.read_text() == "The kite is in Oslo."
    assert (uploads / "b.md").exists()
    assert sources(client) >= {str(file), str(uploads / "b.md")}


def test_what_an_interrupted_ingest_left_can_be_removed(uploads: Path, served: Served) -> None:
    file = uploads / "a.md"
    with served.client as client:
        for named in ("a.md", str(file)):
            served.engine.ingesting.ending = True
            refused(send(client, "a.md", "The kite is in Oslo."), 503)
            served.engine.ingesting.ending = False
            assert file.exists()
            assert forget(client, named).json()["deleted"] == [str(file)]
            assert not file.exists()
            assert forget(client, named).status_code == 400


@pytest.mark.parametrize(
    "source", ["a\0b", "../store", "x" * 5000, "/", ".", "..", ".kvtool-sent/lock", "\ud800", "*#"]
)
def test_names_of_nothing_are_told_so(store: Path, uploads: Path, client: httpx2.Client, source: str) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*.json")}
    send(client, "a.md", "The kite is in Oslo.")
    asked = source.encode("utf-8", "surrogatepass")
    answer = client.delete(DOCUMENTS, params={"source": asked})
    assert answer.status_code == 400, answer.text
    assert (uploads / "a.md").exists()
    assert before == {path: path.read_bytes() for path in before}


def test_a_link_in_the_folder_is_not_followed(store: Path, uploads: Path, client: httpx2.Client) -> None:
    elsewhere = uploads.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.md").write_text("mine")
    (uploads / "folder").symlink_to(elsewhere)
    (uploads / "a.md").symlink_to(elsewhere / "a.md")
    for name in ("folder/b.md", "folder/a.md", "a.md"):
        refused(send(client, name, "theirs"), 403)
    assert [path.name for path in elsewhere.iterdir()] == ["a.md"]
    assert (elsewhere / "a.md").read_text() == "mine"
    assert (uploads / "a.md").is_symlink()


def test_a_pinned_document_keeps_its_file(store: Path, uploads: Path, client: httpx2.Client) -> None:
    send(client, "a.md", "The kite is in Oslo.")
    pin(store, [str(uploads / "a.md")])
    assert "pinned" in refused(forget(client, uploads / "a.md"), 400)
    assert (uploads / "a.md").exists()


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"name": "b.md", "sha256": []}', b'["a"]', b"\xff", None])
def test_a_damaged_note_gives_no_right(uploads: Path, client: httpx2.Client, damage: bytes | None) -> None:
    send(client, "a.md", "The kite is in Oslo.")
    (note,) = (uploads / ".kvtool-sent").glob("*.json")
    note.unlink()
    if damage is None:
        os.mkfifo(note)
    else:
        note.write_bytes(damage)
    refused(forget(client, uploads / "a.md"), 403)
    refused(send(client, "a.md", "The kite is lost."), 403)
    assert (uploads / "a.md").read_text() == "The kite is in Oslo."


def test_names_that_look_alike_are_two_files(uploads: Path, client: httpx2.Client) -> None:
    names = ["\u00e9.md", "e\u0301.md", "A.md", "a.md", "x" * 252 + ".md", "가" * 84 + ".md"]
    for name in names:
        assert send(client, name, f"The kite is in {name}.").json()["documents"]["added"] == 1, name
    for name in names:
        assert forget(client, uploads / name).json()["deleted"] == [str(uploads / name)]
    assert [path.name for path in uploads.iterdir()] == [".kvtool-sent"]


def test_what_a_crash_left_half_done_is_still_the_clients(
    uploads: Path, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the note and the file, the old file is a client's as the new one would have been."""
    from kvtool.serve import documents as module

    send(client, "a.md", "The kite is in Oslo.")
    write = module.atomic_write

    def die(path: Path, data: bytes) -> None:
        if path.suffix == ".md":
            raise OSError(5, "Input/output error")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(module, "atomic_write", die)
        assert send(client, "a.md", "The kite is in Bergen.").status_code >= 400
    assert (uploads / "a.md").read_text() == "The kite is in Oslo."
    assert forget(client, uploads / "a.md").status_code == 200
    assert not (uploads / "a.md").exists()


def test_an_ingest_and_another_server_are_waited_for(store: Path, uploads: Path) -> None:
    from kvtool.serve.documents import Uploads

    with serving(store, uploads=uploads) as served, served.client as client:
        send(client, "a.md", "The kite is in Oslo.")
        with Uploads(uploads).locked():
            for answer in (send(client, "a.md", "Lost."), forget(client, uploads / "a.md")):
                assert answer.status_code == 429
                assert int(answer.headers["Retry-After"]) > 0
        assert (uploads / "a.md").read_text() == "The kite is in Oslo."
        assert forget(client, uploads / "a.md").status_code == 200


def test_notes_are_the_owners_alone(store: Path, uploads: Path) -> None:
    before = os.umask(0)
    try:
        with serving(store, uploads=uploads) as served, served.client as client:
            send(client, "deep/er/a.md", "The kite is in Oslo.")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o077 for path in uploads.rglob("*")}
    assert len(modes) >= 5
    assert not any(modes.values()), modes
    (note,) = (uploads / ".kvtool-sent").glob("*.json")
    assert json.loads(note.read_text())["name"] == "deep/er/a.md"


def test_a_folder_that_cannot_be_written_is_told(store: Path, tmp_path: Path) -> None:
    (tmp_path / "sent").write_text("a file")
    with serving(store, uploads=tmp_path / "sent") as served, served.client as client:
        for answer in (send(client, "a.md", "The kite is in Oslo."), forget(client, "a.md")):
            assert "cannot be written" in refused(answer, 500)
    assert (tmp_path / "sent").read_text() == "a file"


def test_requests_at_once_agree_in_the_end(store: Path, uploads: Path) -> None:
    with serving(store, uploads=uploads) as served, served.client as client, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(send, client, f"{n % 2}.md", f"The kite {n} is in Oslo.") for n in range(12)]
        asked += [pool.submit(forget, client, uploads / f"{n % 2}.md") for n in range(12)]
        assert {one.result().status_code for one in asked} <= {200, 400, 429}
        stored = {Path(source) for source in sources(client) if source.startswith(str(uploads))}
        assert stored == set(uploads.glob("*.md"))


def test_what_a_server_says_to_the_model_makes_no_store_anew() -> None:
    flags = {options_of(QueryOptions)["system"]: "Answer in rhyme."}
    run = Run(resolve(SETTINGS, flags), Out())
    assert run.get(QueryOptions).system == "Answer in rhyme."
    assert _ingesting(run).system is None
    run = Run(resolve(SETTINGS, environ={"KVTOOL_SYSTEM": "Answer in prose."}), Out())
    assert _ingesting(run).system == "Answer in prose."


def text_of(number: int, lines: int = 40) -> str:
    return "\n\n".join(f"Kite {number} of line {line} was flown over Oslo in {1900 + line}." for line in range(lines))


def answers(client: httpx2.Client, question: str = QUESTION) -> str:
    assert client.get("/health").status_code == 200
    asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def full(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 507, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == "no_space"
    assert "over its budget of" in error["message"]
    assert "store prune" in error["hint"] or "store compact" in error["hint"]
    assert error["hint"] in error["message"]
    return error


def leave(store: Path, spare: int) -> None:
    with kvtool.open(store) as cache:
        cache.set_budget(cache.stats()["folder_bytes"] + spare)


def kept(store: Path) -> dict[str, set[str]]:
    with Store.open(store) as opened:
        return {chunk.hex(): set(opened.sizes_here(chunk)) for chunk in opened.chunk_ids()}


def test_documents_until_the_budget_is_met(store: Path, uploads: Path, client: httpx2.Client) -> None:
    owners, before = sources(client), kept(store)
    pinned = sorted(owners)[0]
    pin(store, [pinned])
    leave(store, 2 * 2**20)
    fitting, said = set(), answers(client)
    for number in range(40):
        if (answer := send(client, f"{number}.md", text_of(number))).status_code != 200:
            break
        fitting.add(str(uploads / f"{number}.md"))
        said = answers(client)
    assert fitting
    full(answer)
    lost = uploads / f"{number}.md"
    assert sources(client) == owners | fitting
    assert not lost.exists()
    assert len(list((uploads / ".kvtool-sent").glob("*.json"))) == len(fitting)
    assert before.items() <= kept(store).items()
    assert answers(client) == said
    with kvtool.open(store) as cache:
        stats = cache.stats()
    assert stats["folder_bytes"] <= stats["budget"] + 2**20
    gone = client.delete(DOCUMENTS, params={"source": sorted(fitting)[0]})
    assert gone.status_code == 200, gone.text
    again = send(client, lost.name, text_of(number))
    assert again.status_code == 200, again.text
    assert str(lost) in sources(client)


def test_a_new_version_that_does_not_fit_leaves_the_old_one(store: Path, uploads: Path, client: httpx2.Client) -> None:
    assert send(client, "a.md", "The kite is in Oslo.").status_code == 200
    leave(store, -1)
    full(send(client, "a.md", text_of(1)))
    assert (uploads / "a.md").read_text() == "The kite is in Oslo."
    assert str(uploads / "a.md") in sources(client)
    assert client.get(DOCUMENTS, params={"source": "a.md"}).status_code == 200
    with kvtool.open(store) as cache:
        cache.set_budget(None)
    assert send(client, "a.md", "The kite is in Bergen.").json()["documents"]["changed"] == 1
    assert client.delete(DOCUMENTS, params={"source": str(uploads / "a.md")}).status_code == 200


def test_over_the_budget_documents_stay_without_kv(store: Path, uploads: Path, client: httpx2.Client) -> None:
    owners = sources(client)
    leave(store, 2 * 2**20)
    rows = [{"name": f"{number:02}.md", "text": text_of(number)} for number in range(30)]
    report = client.post(DOCUMENTS, json={"documents": rows}).json()
    assert report["left"]["reason"] == "size"
    listed = sources(client) - owners
    assert listed == {str(path) for path in uploads.glob("*.md")}


def test_a_name_that_is_sent_twice_at_once_leaves_the_former_version(
    client: httpx2.Client, store: Path, uploads: Path
) -> None:
    assert send(client, "note.md", "The first version.").status_code == 200
    leave(store, 100)
    rows = [{"name": "note.md", "text": f"{word} " * 2000} for word in ("second", "third")]
    answer = client.post(DOCUMENTS, json={"documents": rows})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
    assert (uploads / "note.md").read_text() == "The first version."
