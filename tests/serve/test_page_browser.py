from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtool.core.query.options import QueryOptions
from tests.cli.working import QUESTION, kvtool
from tests.serve.conftest import KEY, PATIENCE, Served, serving, turned, wait_until
from tests.serve.test_process import running

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="chromium is not installed (apt-get install chromium)"
)
_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-proxy-server")
OTHER = "세 번째 제분소는 누가 지었습니까?"

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def open_page() -> Iterator[Open]:
    """Open pages in one browser. Nothing may be written to their consoles but what requests that fail write there."""
    api = pytest.importorskip("playwright.sync_api")
    complaints = list[str]()

    def opened(url: str, key: str | None = KEY, width: int = 1600, **more: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **more)
        page: Page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", lambda said: complaints.append(said.text) if "Failed to load" not in said.text else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        if key is not None:
            unlock(page, key)
        return page

    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*_FLAGS])
        yield opened
        browser.close()
    assert complaints == []


@contextmanager
def served_with(store: Path, uploads: Path | None = None, tokens: int = 8) -> Iterator[Served]:
    with serving(store, uploads=uploads, asking=QueryOptions(max_tokens=tokens)) as served:
        yield served


def unlock(page: Page, key: str) -> None:
    page.locator("#key-text").fill(key)
    page.keyboard.press("Enter")


def ask(page: Page, question: str = QUESTION) -> None:
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")


def answer(page: Page, number: int) -> Any:
    article = page.locator(f"article[aria-label='Answer {number}'][aria-busy='false']")
    article.wait_for()
    return article


def text_file(name: str, text: str = "The third mill was built by baker A.") -> Any:
    return {"name": name, "mimeType": "text/plain", "buffer": text.encode()}


def is_scrolled(page: Page) -> bool:
    return bool(page.evaluate("() => document.documentElement.scrollWidth > document.documentElement.clientWidth"))


@pytest.mark.slow
def test_a_wrong_key_is_told_and_the_right_one_is_kept(served: Served, open_page: Open) -> None:
    page = open_page(served.url, key="not-the-key-of-it")
    page.locator("#key-wrong", has_text="does not know this key").wait_for()
    page.keyboard.press("Escape")
    page.locator("#trouble").wait_for()
    ask(page)
    page.locator("#key-text").wait_for()
    assert page.locator("#key-wrong").text_content() == ""  # the wrong key is forgotten
    unlock(page, KEY)
    answer(page, 1).locator(".facts").wait_for()
    page.locator("#list li").first.wait_for()
    assert page.locator("#count").inner_text() == "6 documents"
    assert not page.locator("#trouble").is_visible()
    assert page.locator("#model").inner_text()
    page.reload()  # the tab has the key
    page.locator("#list li").first.wait_for()
    assert not page.locator("#key").is_visible()
    another = open_page(served.url, key=None)  # another tab of another session does not
    another.locator("#key-text").wait_for()
    another.keyboard.press("Escape")
    another.locator("#trouble", has_text="Without the API key").wait_for()
    another.locator("#again").click()
    unlock(another, KEY)
    another.locator("#list li").first.wait_for()
    assert not another.locator("#trouble").is_visible()


@pytest.mark.slow
def test_a_key_in_the_address_is_kept_and_removed_there(served: Served, open_page: Open) -> None:
    page = open_page(f"{served.url}/#key={KEY}", key=None)
    page.locator("#list li").first.wait_for()
    assert page.url == f"{served.url}/"
    page.reload()
    page.locator("#list li").first.wait_for()
    assert not page.locator("#key").is_visible()
    another = open_page(served.url, key=None)
    another.locator("#key-text").wait_for()
    another.evaluate("key => { location.hash = `key=${key}` }", KEY)  # pasted where the page is open
    another.locator("#list li").first.wait_for()
    assert not another.locator("#key").is_visible()
    assert another.url == f"{served.url}/"


@pytest.mark.slow
def test_a_wrong_number_of_the_options_is_told(served: Served, open_page: Open) -> None:
    page = open_page(served.url)
    page.locator("#options > summary").click()
    page.locator("#top-k").fill("0")
    for send in (lambda: page.locator("#ask-button").click(), lambda: page.keyboard.press("Enter")):
        page.locator("#options > summary").click()
        page.locator("#question").fill(QUESTION)
        send()
        page.locator("#options-wrong", has_text="from 1 to 1000").wait_for()
        assert page.locator("#top-k:focus").is_visible()
        assert page.locator("article").count() == 0
    page.locator("#top-k").fill("1")
    page.locator("#question").press("Enter")
    assert answer(page, 1).locator(".sources > summary").inner_text() == "1 source"
    assert page.locator("#options-wrong").text_content() == ""
    assert page.locator("#fusion-server").text_content() == "the server’s (union)"


def test_an_answer_is_streamed_and_cites_its_sources(served: Served, open_page: Open) -> None:
    page = open_page(served.url)
    page.locator("#list li").first.wait_for()
    with turned(served) as permits:
        ask(page)
        permits.release(4)
        begun = page.locator("article[aria-busy='true'] .text")
        wait_until(lambda: begun.inner_text().strip())
        assert page.locator("#stop").is_visible()
        permits.release(100)
        first = answer(page, 1)
    assert page.locator("#said").inner_text() == "The answer is complete."
    with served.client as client:
        body = {"messages": [{"role": "user", "content": QUESTION}], "kvtool": {"cite": True}}
        expected = client.post("/v1/chat/completions", json=body).json()
    citations = expected["kvtool"]["citations"]
    text = first.locator(".text").text_content()
    for one in reversed(citations):
        text = text.replace(f" [{one['number']}]", "", 1)
    assert text == expected["choices"][0]["message"]["content"]
    assert first.locator(".text .cite").count() == len(citations) > 0
    first.locator(".cite").first.focus()
    page.keyboard.press("Enter")  # the keyboard is enough
    mark = page.locator("mark:focus")
    mark.wait_for()
    assert " ".join(mark.inner_text().split()) == citations[0]["text"]
    assert page.locator(".led").inner_text() == mark.inner_text()
    first.locator(".passage .cite").first.click()  # and back
    assert page.locator(".text .cite:focus.led").inner_text() == f"[{citations[0]['number']}]"
    first.get_by_text("a made-up sentence gets a number, too").wait_for()
    assert first.locator(".sources > ol > li").count() == len(expected["kvtool"]["chunks"])
    tokens = expected["kvtool"]["tokens"]
    legend = first.locator(".legend").inner_text()
    for kind in ("reused", "recomputed", "fresh"):
        assert f"{tokens[kind]} {kind}" in legend
    first.locator(".work > summary").click()
    first.locator(".map > summary").click()
    counted = first.locator(".map p").first.inner_text()
    assert counted.startswith(f"{tokens['recomputed']} of the passages")
    assert first.locator(".map mark.recomputed").count() > 0
    told = first.locator(".chosen")
    first.locator(".map mark.recomputed").first.click()
    assert told.inner_text().endswith(first.locator(".map mark").first.get_attribute("title") or "?")
    assert f"{tokens['recomputed']} recomputed: " in first.locator(".reasons").inner_text()
    first.get_by_text("What do these words mean?").click()
    first.locator(".words dt", has_text="full prefill").wait_for()
    assert first.locator(".strip rect.recomputed").count() == first.locator(".map mark.recomputed").count()
    first.get_by_role("button", name="Measure full prefill").click()
    first.get_by_text("Measured just now").wait_for()
    assert "measured" in first.locator(".work > summary").inner_text()
    ask(page, "And when was it built?")  # a conversation
    second = answer(page, 2)
    assert "kept from earlier turns" in second.locator(".legend").inner_text()


def test_a_checked_answer_is_the_final_one(served: Served, open_page: Open) -> None:
    page = open_page(served.url)
    page.locator("#options > summary").click()
    page.locator("#verify").check()
    page.locator("#cite").uncheck()
    page.locator("#fusion").select_option("reuse")
    ask(page)
    note = answer(page, 1).locator(".note", has_text="Full prefill checked the answer and corrected it").first
    note.wait_for()
    drafted = answer(page, 1).locator("details", has_text="Answer before its correction").locator("p")
    for mode, shown in (("full", answer(page, 1).locator(".text")), ("reuse", drafted)):
        with served.client as client:
            body = {"messages": [{"role": "user", "content": QUESTION}], "kvtool": {"fusion": mode}}
            expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert shown.text_content() == expected


def test_enter_that_ends_a_composition_sends_nothing(served: Served, open_page: Open) -> None:
    page = open_page(served.url, width=400)
    box = page.locator("#question")
    box.focus()
    keyboard = page.context.new_cdp_session(page)
    keyboard.send("Input.imeSetComposition", {"text": "제분소", "selectionStart": 3, "selectionEnd": 3})
    page.keyboard.press("Enter")
    assert box.input_value().startswith("제분소")
    assert page.locator("article").count() == 0
    keyboard.send("Input.insertText", {"text": "제분소"})
    box.fill(OTHER)
    page.keyboard.press("Shift+Enter")
    assert page.locator("article").count() == 0
    page.keyboard.press("Enter")
    answer(page, 1)
    assert page.locator(".question").get_attribute("lang") == "ko"
    assert page.locator(".question").inner_text().strip() == OTHER


@pytest.mark.slow
def test_a_server_that_is_gone_is_told_and_found_again(ready: Path, open_page: Open) -> None:
    with served_with(ready) as served:
        page = open_page(served.url)
        page.locator("#list li").first.wait_for()
        page.context.set_offline(True)
        ask(page)
        page.locator("#gone").wait_for()
        article = answer(page, 1)
        article.get_by_text("The server does not answer.").wait_for()
        page.context.set_offline(False)
        page.locator("#retry").click()
        page.locator("#gone").wait_for(state="hidden")
        page.locator("#said", has_text="The server answers again.").wait_for()
        article.get_by_role("button", name="Ask again").click()
        answer(page, 2).locator(".facts").wait_for()
        with turned(served) as permits:  # an answer that the reader stops
            ask(page)
            permits.release(4)
            wait_until(lambda: page.locator("article[aria-busy='true'] .text").inner_text().strip())
            ask(page, "Too early?")
            page.locator("#said", has_text="Wait for the end of the answer").wait_for()
            assert page.locator("#question").input_value() == "Too early?"
            page.locator("#stop").click()
            page.locator("#ask-button:focus").wait_for()
            answer(page, 3).get_by_text("Stopped. The answer is incomplete").wait_for()
    ask(page)  # it has ended
    page.locator("#gone").wait_for()


@pytest.mark.slow
def test_a_server_that_is_killed_in_an_answer(
    store: Path, open_page: Open, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTOOL_SET", "sampling.stop_repeats=false")
    with running("--store", store, "--max-tokens", "1500") as (process, url):
        page = open_page(url, key=kvtool("serve", "--show-key").fine().out.strip())
        page.locator("#list li").first.wait_for()
        ask(page)
        wait_until(lambda: page.locator("article[aria-busy='true'] .text").inner_text().strip())
        process.kill()
        page.locator("#gone").wait_for()
        note = answer(page, 1).locator(".note.wrong")
        note.wait_for()
        assert "The server does not answer. The answer is incomplete" in note.inner_text()


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_nothing_is_wider_than_the_window(served: Served, open_page: Open, width: int, colours: str) -> None:
    page = open_page(served.url, width=width, color_scheme=colours)
    page.locator("#list li").first.wait_for(state="attached")
    ask(page, f"{QUESTION} {'W' * 300}")
    first = answer(page, 1)
    for each in (".sources > summary", ".sources li summary >> nth=0", ".work > summary", ".map > summary"):
        first.locator(each).click()
    page.locator("#options > summary").click()
    assert not is_scrolled(page)
    assert page.locator("#documents").get_attribute("open") == ("" if width == 1600 else None)
    if width == 400:
        page.locator("#documents > summary").click()
        assert not is_scrolled(page)
    assert page.locator("#question").is_visible()
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if colours == "light" else "rgb(20, 24, 29)")


_UI = """() => {
    const foreign = "code, h1, noscript, .path, #model, .passage, [lang]:not(html), option[value]:not([value=''])";
    const isOwn = (node) => node.checkVisibility() && !node.closest(foreign);
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) if (isOwn(walker.currentNode.parentElement)) found.push(walker.currentNode.data);
    for (const name of ["aria-label", "title", "placeholder"])
        for (const node of document.querySelectorAll(`[${name}]`)) if (isOwn(node)) found.push(node.getAttribute(name));
    return found.filter((text) => text.trim());
}"""


@pytest.mark.slow
def test_the_page_is_korean_for_a_korean_browser(store: Path, tmp_path: Path, open_page: Open) -> None:
    with served_with(store, tmp_path / "sent") as served:
        page = open_page(served.url, locale="ko-KR")
        page.locator("#list li").first.wait_for()
        page.locator("#files").set_input_files(
            [text_file("수로.txt", "수로는 1830년에 완공되었다."), text_file("빈.txt", "")]
        )
        page.locator("#documents-said", has_text="파일 2개 중 1개를 저장했습니다.").wait_for()
        page.locator("#question").fill(QUESTION)
        page.locator("#question").press("Enter")
        article = page.locator("article[aria-label='답변 1'][aria-busy='false']")
        for each in (".sources > summary", ".work > summary", ".map > summary", ".words > summary"):
            article.locator(each).click()
        page.locator("#options > summary").click()
        for summary in page.locator("#options .words > summary, #documents > .words > summary").all():
            summary.click()
        assert page.evaluate("() => document.documentElement.lang") == "ko"
        told = page.evaluate(_UI)
        known = set("API DRM Enter KV MB Shift full ingest kB kvtool ms reuse union".split())
        for text in told:
            own = re.sub(r"\S+\.(md|txt)", "", text)  # names of files
            assert not {*re.findall(r"[A-Za-z]{2,}", own)} - known, text
        assert sum(bool(re.search("[가-힣]", text)) for text in told) > 60
        page.locator("#language").click()
        assert page.evaluate("() => document.documentElement.lang") == "en"
        page.locator("article[aria-label='Answer 1'] .work", has_text="Began after").wait_for()
        assert "tokens were computed" in str(page.locator("svg.strip").get_attribute("aria-label"))
        assert page.locator("#sent li", has_text="empty").is_visible()
        page.reload()
        page.locator("#count", has_text="7 documents").wait_for()
        assert page.locator("#language").inner_text() == "한국어"


def replying(status: int, body: object) -> Callable[[Any], None]:
    text = body if isinstance(body, str) else json.dumps(body)
    return lambda route: route.fulfill(status=status, body=text)


@pytest.mark.slow
def test_what_fails_is_told_in_korean(ready: Path, tmp_path: Path, open_page: Open) -> None:
    refused = [
        (409, {"error": {"message": "'a' holds 1 further document", "code": "part_of_file", "hint": "name the file"}}),
        (404, {"error": {"message": "document not found: 'a'", "code": "no_document", "hint": ""}}),
        (503, {"error": {"message": "writing: process 7", "code": "store_locked", "hint": "wait"}}),
        (413, {"error": {"message": "the request is too long", "code": "http", "hint": ""}}),
    ]
    with served_with(ready, tmp_path / "sent") as served:
        page = open_page(served.url, locale="ko-KR", width=320)
        page.locator("#documents > summary").click()
        page.locator("#list li").first.wait_for()
        told = []
        for one in refused:
            page.route("**/v1/documents?*", replying(*one))
            page.locator("#list li button").first.click()
            page.locator("#documents-said").evaluate("node => { node.textContent = '' }")
            page.locator("#confirm button[value=remove]").click()
            page.locator("#documents-said.wrong", has_text="삭제하지 못했습니다").wait_for()
            told.append(page.locator("#documents-said").inner_text().split(". ", 1)[1])
        page.route("**/v1/documents", replying(200, "<p>not of the server</p>"))
        page.locator("#files").set_input_files([text_file("수로.txt")])
        page.locator("#sent .wrong").wait_for()
        told.append(page.locator("#sent .wrong").inner_text().partition("(")[0])
        assert not [text for text in told if re.search("[A-Za-z]{2}", text) or not re.search("[가-힣]", text)]
        assert len({*told}) == 5
        assert not is_scrolled(page)
