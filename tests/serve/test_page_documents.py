"""The page in a browser: documents that are sent, found and removed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.ingest.options import IngestOptions
from kvtool.core.query.options import QueryOptions
from tests.cli.working import QUESTION
from tests.serve.conftest import PATIENCE, Served, serving
from tests.serve.test_page_browser import Open, answer, ask, open_page, served_with, text_file

__all__ = ["open_page"]
pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="chromium is not installed (apt-get install chromium)"
)


@contextmanager
def held(served: Served) -> Iterator[threading.Event]:
    free, ingest = threading.Event(), served.engine.ingest

    def wait(options: IngestOptions) -> Any:
        with served.engine.ingesting.noted() as events:
            events.step("computing KV", 100, "tokens")
            events.advance(10)
            free.wait(PATIENCE)
        return ingest(options)

    served.engine.ingest = wait  # type: ignore[method-assign]
    try:
        yield free
    finally:
        free.set()


def test_documents_are_sent_found_and_removed(store: Path, tmp_path: Path, open_page: Open) -> None:
    folder = tmp_path / "sent"
    with served_with(store, folder) as served:
        page = open_page(served.url)
        page.locator("#list li").first.wait_for()
        files = [
            text_file("수로.md", "수로는 1830년에 완공되었다. " * 40),
            text_file("<img src=x onerror=alert(1)>.md", "# <b>Bold</b>\n\nText."),
            {"name": "none.zzz", "mimeType": "application/octet-stream", "buffer": bytes(range(256))},
        ]
        page.locator("#files").set_input_files(files)
        page.locator("#documents-said", has_text="2 of 3 files stored").wait_for()
        assert "added" in page.locator("#sent li").first.inner_text()
        assert "not a document" in page.locator("#sent li").nth(2).inner_text()
        assert page.locator("img").count() == page.locator("#list b").count() == 0
        assert (folder / "수로.md").exists()
        page.locator("#filter").fill("수로")
        assert page.locator("#list li").count() == 1
        assert page.locator("#count").inner_text() == "1 of 8 documents"
        page.get_by_role("button", name="Remove 수로.md").click()
        page.locator("#confirm").get_by_text("Cancel").click()
        assert (folder / "수로.md").exists()
        page.get_by_role("button", name="Remove 수로.md").click()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.locator("#documents-said", has_text="수로.md is removed").wait_for()
        assert not (folder / "수로.md").exists()
        assert page.locator("#list li").count() == 0
        page.locator("#filter").fill("mill")
        assert page.locator("#list li").count() == 6
    with served_with(store) as served:
        page = open_page(served.url)
        page.locator("#no-uploads").wait_for()
        assert not page.locator("#uploads").is_visible()


@pytest.mark.slow
def test_files_wait_and_are_not_lost_without_a_word(store: Path, tmp_path: Path, open_page: Open) -> None:
    """Those that are dropped meanwhile wait, too; an ingest that runs on is shown after a reload."""
    with served_with(store, tmp_path / "sent") as served, held(served) as free:
        page = open_page(served.url)
        page.locator("#list li").first.wait_for()
        asked = list[str]()
        page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
        page.locator("#question").click()
        page.locator("#files").set_input_files([text_file("one.txt"), text_file("two.txt", "Bakers bake.")])
        page.locator("#sent li").nth(1).wait_for()
        is_taken = page.locator("#question").evaluate(
            """box => {
                const dataTransfer = new DataTransfer();
                dataTransfer.items.add(new File(["Millers mill."], "three.txt"));
                return !box.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
            }"""
        )
        assert is_taken
        assert page.locator("#sent li").count() == 3
        page.locator("#sent li", has_text="computing: 10 of 100 tokens").wait_for()
        page.reload()
        assert asked == ["beforeunload"]
        page.locator("#ingest", has_text="10 of 100 tokens").wait_for()
        page.locator("#documents-said", has_text="one.txt, two.txt, three.txt").wait_for()
        free.set()
        page.locator("#list li", has_text="one.txt").wait_for()
        assert page.locator("#ingest").is_hidden()
        page.locator("#files").set_input_files([text_file("two.txt", "Bakers bake."), text_file("three.txt", "Mill.")])
        page.locator("#documents-said", has_text="2 of 2 files stored").wait_for()
        page.reload()
        page.locator("#list li", has_text="three.txt").wait_for()
        assert asked == ["beforeunload"]
        assert page.locator("#documents-said").text_content() == ""


@pytest.mark.slow
def test_a_failed_file_says_why_and_the_list_is_closed(store: Path, tmp_path: Path, open_page: Open) -> None:
    with served_with(store, tmp_path / "sent") as served:
        page = open_page(served.url)
        page.locator("#list li").first.wait_for()
        files = [text_file(f"{number}.txt", "") for number in range(9)]
        files += [text_file("fake.pdf", "%PDF-1.7 no"), text_file("photo.png", "\x89PNG\0"), text_file("mill.md")]
        files += [text_file("fake.eml", "no head"), text_file("rows.jsonl", '{"a": 1}')]
        page.locator("#files").set_input_files(files)
        page.locator("#documents-said", has_text="1 of 14 files stored").wait_for()
        told = [" ".join(text.split()) for text in page.locator("#sent li").all_inner_texts()]
        assert told[:9] == [f"{number}.txt empty" for number in range(9)]
        assert told[9:] == [
            "fake.pdf damaged, or not what its name says",
            "photo.png a picture: only text is read",
            "mill.md added",
            "fake.eml damaged, or not what its name says",
            "rows.jsonl no line has a text",
        ]
        assert (page.locator("#list").bounding_box() or {})["y"] < 600
        page.locator("#close-sent").click()
        assert page.locator("#sent").is_hidden()
        page.locator("#files").set_input_files([text_file("mill.md", "Another text.")])
        page.locator("#sent li", has_text="replaced").wait_for()


@pytest.mark.slow
def test_names_that_are_the_same_are_told_apart(store: Path, tmp_path: Path, open_page: Open) -> None:
    for folder in ("east", "west"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "Aqueduct.md").write_text(f"The {folder} aqueduct carries water.")
    with served_with(store) as served:
        served.engine.ingest(IngestOptions(paths=(tmp_path / "east", tmp_path / "west")))
        page = open_page(served.url)
        page.locator("#list li").nth(7).wait_for()
        names = page.locator("#list .name").all_inner_texts()
        assert names == sorted(names, key=str.lower)
        rows = page.locator("#list li", has_text="Aqueduct.md")
        for folder, row in zip(("east", "west"), rows.all_inner_texts(), strict=True):
            assert f"in {folder}" in row
        assert "in " not in page.locator("#list li").last.inner_text()
        rows.first.locator("summary").click()
        assert rows.first.locator(".path").inner_text() == str(tmp_path / "east" / "Aqueduct.md")


@pytest.mark.slow
def test_a_server_without_key_and_documents(tiny: Path, tmp_path: Path, open_page: Open) -> None:
    store, uploads = tmp_path / "none", tmp_path / "sent"
    with serving(store, key=None, model=str(tiny), uploads=uploads, asking=QueryOptions(max_tokens=4)) as served:
        page = open_page(served.url, key=None)
        page.locator("#count", has_text="No document yet.").wait_for()
        assert page.locator("#model").inner_text() == "no model yet"
        ask(page)
        note = answer(page, 1).locator(".note.wrong", has_text="No documents yet: add some under “Documents”.")
        note.wait_for()
        assert str(store) not in page.locator("body").inner_text()
        page.locator("#files").set_input_files([text_file("mill.md")])
        page.locator("#documents-said", has_text="1 of 1 file stored").wait_for()
        assert page.locator("#model").inner_text() == "tiny"
        page.locator("#language").focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")  # to the question
        page.keyboard.type(QUESTION)
        page.keyboard.press("Enter")
        assert answer(page, 2).locator(".sources > summary").inner_text() == "1 source"
        page.get_by_role("button", name="Remove mill.md").click()
        page.locator("#confirm .danger").click()
        page.locator("#count", has_text="No document yet.").wait_for()
        page.locator("#new").click()
        ask(page)
        answer(page, 3).locator(".note.wrong", has_text="No documents yet: add some under “Documents”.").wait_for()
