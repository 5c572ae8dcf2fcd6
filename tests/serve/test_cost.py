"""Cost of one request: work is linear in its length, and bounds are checked first."""

from __future__ import annotations

import subprocess
import sys
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest

from kvtool.core.common import spelling
from kvtool.core.errors import EXIT_TERMINATED, UsageError
from kvtool.core.model.tokens import _overlap
from kvtool.core.query.conversation import BACK, search_text
from kvtool.core.retrieval import terms as of_terms
from kvtool.core.retrieval.finder import _MOST_SPLITS, Places, _matcher
from kvtool.serve import wire
from kvtool.serve.wire import LONGEST_NAME, LONGEST_TEXT, MOST_NAMES
from tests.cli.working import QUESTION
from tests.serve.conftest import PATIENCE, Served

CHAT = "/v1/chat/completions"
HANG = 60.0  # seconds in which linear work is long done; quadratic work took minutes


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False)


# Each is to print `refused`.
COSTLY = [
    # names of an object again and again, and one of them twice
    "from kvtool.serve.wire import _parsed, Refusal\n"
    "names = ','.join(f'\"{n}\":0' for n in range(90_000))\n"
    "try: _parsed(('{' + names + ',\"89999\":1}').encode())\nexcept Refusal: print('refused')",
    # marks of one letter in no order
    "from kvtool.core.retrieval.terms import terms\nterms('a' + '\\u0301\\u0316' * 250_000); print('refused')",
    "from kvtool.core.retrieval.terms import terms\nterms('aB-' * 250_000 + 'a' * 750_000); print('refused')",
    "from kvtool.core.common.spelling import composed\ncomposed('\\uff9e\\u0301' * 250_000); print('refused')",
    # spaces at any of which a label might begin
    "from kvtool.core.retrieval.finder import Places\nfrom kvtool.core.errors import UsageError\n"
    "class Store:\n    def documents_revision(self): return 0\n    def sources(self): return []\n"
    "try: Places(Store()).of_chunks('z' + ' ' * 250_000 + 'z')\nexcept UsageError: print('refused')",
    # a word that known ones are compared with
    "from kvtool.core.errors import did_you_mean\ndid_you_mean('fu' * 500_000, ['fusion', 'ratio']); print('refused')",
    # brackets of globs that none closes
    "from kvtool.core.retrieval.finder import _matcher\n_matcher(['[' * 64_000])\n"
    "from kvtool.core.upkeep.selectors import matches_glob\nmatches_glob('[' * 64_000, 'a', 'a'); print('refused')",
    # quotation marks that do not end
    "from kvtool.serve.wire import check_shape\ncheck_shape('\"' + '\\\\\"' * 4_000_000); print('refused')",
]


def test_work_grows_with_the_length_alone() -> None:
    done = ended("\n".join(COSTLY))
    assert done.stdout.split() == ["refused"] * len(COSTLY), done.stderr


def test_letters_are_normalised_as_ever() -> None:
    for text in (
        "plain",
        "Zoë à la carte",
        "각 ガ ﾊﾟ",
        "a" + "\u0301" * 30,
        "≠" * 40 + "=\u0338",
        "…" * 50,
        "e\u0301!?" * 40,
    ):
        for form in ("NFC", "NFKC"):
            assert spelling.normalised(form, text) == unicodedata.normalize(form, text)  # type: ignore[arg-type]


def test_long_words_are_not_kept() -> None:
    before = of_terms._split.cache_info().currsize, of_terms._asked.cache_info().currsize
    assert of_terms.terms("x" * 10_000) == (["x" * 10_000], [])
    assert of_terms.asked_terms("x" * 10_000) == [("x" * 10_000,)]
    assert (of_terms._split.cache_info().currsize, of_terms._asked.cache_info().currsize) == before


def test_a_label_is_looked_for_at_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Store:
        def documents_revision(self) -> int:
            return 0

        def sources(self) -> list[str]:
            return []

        def document(self, source: str) -> None:
            return None

    places = Places(Store())  # type: ignore[arg-type]
    monkeypatch.setattr(places, "_documents", lambda name: tried.append(name) or [])
    with pytest.raises(Exception, match="has no"):
        places.of_chunks("z " * 2000 + "row 9")
    assert len(tried) == _MOST_SPLITS
    with pytest.raises(UsageError, match="names no chunk"):
        places.of_chunks("a.md:" + "9" * 5000)
    tried.clear()
    with pytest.raises(Exception, match="has no"):
        places.of_chunks("my book.xlsx Costs row 9")
    assert tried == ["my", "my book.xlsx"]
    tried.clear()
    with pytest.raises(Exception, match="has no"):
        places.of_chunks("my lease.docx header – ¶ 7")
    assert tried[0] == "my lease.docx"


def test_globs_are_one_pattern() -> None:
    is_meant = _matcher(["*.md", "b/c.txt", "notes"])
    assert [is_meant(name) for name in ("/a/x.md", "/a/b/c.txt", "/a/c.txt", "/notes", "/a/notes/x", "/l/x.md#r1")] == [
        *(True, True, False, True, False, True)
    ]


def test_brackets_that_none_closes_are_letters() -> None:
    is_meant = _matcher(["[a-c]x[", "y[]", "[!a][[z", "[]]", "[]v[", "[!]w[a"])
    assert [is_meant(name) for name in ("bx[", "y[]", "b[[z", "]", "[]v[", "[!]w[a", "dx[", "a[[z", "y]")] == [
        *(True,) * 6,
        *(False,) * 3,
    ]


def test_a_follow_up_looks_back_at_few_questions() -> None:
    looked = 0

    class Finder:
        def rare_words(self, text: str, share: float) -> int:
            nonlocal looked
            looked += 1
            return 0

    text = search_text("And?", [str(number) for number in range(5000)], Finder())  # type: ignore[arg-type]
    assert looked == BACK + 1
    assert text.split()[:BACK] == [str(number) for number in range(5000 - BACK, 5000)]


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [("a\n", "\n\n", 1), ("abab", "abc", 2), ("abab", "babab", 3), ("x", "x", 0), ("", "ab", 0)],
)
def test_the_beginning_of_a_stop(text: str, stop: str, held: int) -> None:
    assert _overlap(text, stop) == held


# ---- at the wire -------------------------------------------------------------------------------------------------


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2, **more}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * (LONGEST_TEXT + 1)}]}),
        (CHAT, {"messages": [{"role": "system", "content": "a" * (LONGEST_TEXT + 1)}, *body()["messages"]]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 5000}),
        (CHAT, {"messages": [{"role": "u" * 10**6, "content": "a"}]}),
        (CHAT, body(model="m" * (LONGEST_NAME + 1))),
        (CHAT, body(user="u" * (LONGEST_NAME + 1))),
        (CHAT, body(stop=["s" * 1001])),
        (CHAT, body(stop=["s"] * 17)),
        (CHAT, body(n="9" * 10**6)),
        (CHAT, body(**{"x" * 10**6: 1})),
        (CHAT, body(kvtool={"fu" * 10**6: 1})),
        (CHAT, body(kvtool={"fusion": "e" * 10**6})),
        (CHAT, body(kvtool={"chunks": ["z" + " " * 60_000 + "z"]})),
        (CHAT, body(kvtool={"chunks": ["ab12"] * (MOST_NAMES + 1)})),
        (CHAT, body(kvtool={"documents": ["d"] * (MOST_NAMES + 1)})),
        (CHAT, body(kvtool={"source": ["*"] * (MOST_NAMES + 1)})),
        (CHAT, body(kvtool={"source": ["*a" * 10**5]})),
        (CHAT, body(kvtool={"source": ["*a" * 2000 + str(number) for number in range(9)]})),
        (CHAT, body(metadata=[[]] * 10**5)),
        ("/v1/completions", {"prompt": "a" * (LONGEST_TEXT + 1)}),
        ("/v1/embeddings", {"input": ["a"] * 3000}),
    ],
)
def test_what_is_too_much_is_refused_in_few_words(served: Served, path: str, value: dict[str, Any]) -> None:
    with served.client as client:
        answer = client.post(path, json=value)
    assert answer.status_code in (400, 404), answer.text[:500]
    assert len(answer.content) < 20_000


def test_what_is_just_short_enough_is_taken(served: Served) -> None:
    with served.client as client:
        answer = client.post(
            CHAT, json=body(user="u" * LONGEST_NAME, metadata={"a": list(range(10_000))}, stop=["s" * 1000])
        )
        assert answer.status_code == 200, answer.text[:500]
        long = client.post(CHAT, json={"messages": [{"role": "user", "content": "mill " * (LONGEST_TEXT // 5)}]})
        assert long.status_code == 400
        assert "the model takes" in long.json()["error"]["message"]


def test_brackets_of_a_text_are_no_nesting(served: Served) -> None:
    with served.client as client:
        answer = client.post(
            CHAT, json={"messages": [{"role": "user", "content": f"{QUESTION} {'[{' * 500}"}], "max_tokens": 1}
        )
    assert answer.status_code == 200, answer.text[:500]


def test_a_long_request_is_read_beside_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parsed = wire._parsed

    def noted(data: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return parsed(data)

    monkeypatch.setattr(wire, "_parsed", noted)
    with served.client as client:
        for metadata in ("short", "long" * 50_000):
            assert client.post(CHAT, json=body(metadata=metadata)).status_code == 200
    assert not threads[0].startswith("kvtool-brief")
    assert threads[1].startswith("kvtool-brief")


def test_health_does_not_wait_for_embeddings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of them may wait for the model: they do not take all threads."""
    go, waiting = threading.Event(), threading.Semaphore(0)

    def embed(words: Sequence[str]) -> tuple[list[Any], int]:
        waiting.release()
        assert go.wait(PATIENCE)
        return [], 0

    monkeypatch.setattr(type(served.engine), "embedder_name", "one")
    monkeypatch.setattr(served.engine, "embed", embed)
    clients = [threading.Thread(target=_embeds, args=(served,), daemon=True) for _ in range(50)]
    for client in clients:
        client.start()
    try:
        assert waiting.acquire(timeout=PATIENCE)
        with served.client as http:
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
            assert http.post(CHAT, json=body(metadata="long" * 50_000)).status_code == 200
    finally:
        go.set()
        for client in clients:
            client.join(PATIENCE)


def _embeds(served: Served) -> None:
    with served.client as http:
        http.post("/v1/embeddings", json={"input": "a"})


# ---- the end -----------------------------------------------------------------------------------------------------


def test_an_end_that_does_not_come_is_made() -> None:
    done = ended(
        "import threading\nfrom kvtool.serve.server import Watchdog\n"
        "Watchdog(0.1, lambda text, hint: print(text, flush=True)).start()\nthreading.Event().wait()"
    )
    assert done.returncode == EXIT_TERMINATED
    assert "has not shut down" in done.stdout


def test_an_end_is_made_of_an_interpreter_that_is_held() -> None:
    """A search for a pattern, for example, takes no signal and lets no thread run."""
    done = ended(
        "import re\nfrom kvtool.serve import server\nserver._LAST_RESORT = 0.1\n"
        "watchdog = server.Watchdog(0.1, lambda text, hint: None)\nwatchdog._run = lambda: None\n"
        "watchdog.start()\nre.match('(a|a)*b', 'a' * 60)"
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
