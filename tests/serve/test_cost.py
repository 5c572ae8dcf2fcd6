"""Cost of one request: work is linear in its length, and bounds are checked first."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock, patch

import httpx2
import pytest

from kvtool.core.common.text import normalised
from kvtool.core.errors import UsageError
from kvtool.core.query.conversation import BACK, search_text
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
    "from kvtool.core.common.text import composed\ncomposed('\\uff9e\\u0301' * 250_000); print('refused')",
    # spaces at any of which a label might begin
    "from kvtool.core.retrieval.finder import Places\nfrom kvtool.core.errors import UsageError\n"
    "class Store:\n    def documents_revision(self): return 0\n    def sources(self): return []\n"
    "try: Places(Store()).of_chunks('z' + ' ' * 250_000 + 'z')\nexcept UsageError: pass\n"
    "try: Places(Store()).of_chunks('a.md:' + '9' * 5000)\nexcept UsageError: print('refused')",
    # a word that known ones are compared with
    "from kvtool.core.errors import did_you_mean\ndid_you_mean('fu' * 500_000, ['fusion', 'ratio']); print('refused')",
    # brackets of globs that none closes
    "from kvtool.core.retrieval.finder import _matcher\n_matcher(['[' * 64_000])\n"
    "from kvtool.core.upkeep.documents import matches_glob\nmatches_glob('[' * 64_000, 'a', 'a'); print('refused')",
    # quotation marks that do not end
    "from kvtool.serve.wire import check_shape\ncheck_shape('\"' + '\\\\\"' * 4_000_000); print('refused')",
]


@pytest.mark.slow
def test_work_grows_with_the_length_alone() -> None:
    done = ended("\n".join(COSTLY))
    assert done.stdout.split() == ["refused"] * len(COSTLY), done.stderr


def test_letters_are_normalised_as_ever() -> None:
    long = ("a" + "\u0301" * 30, "≠" * 40 + "=\u0338", "…" * 50, "e\u0301!?" * 40)
    for written in ("plain", "Zoë à la carte", "각 ガ ﾊﾟ", *long):
        for form in ("NFC", "NFKC"):
            assert normalised(form, written) == unicodedata.normalize(form, written)  # type: ignore[arg-type]


def test_a_label_is_looked_for_at_few_places() -> None:
    places = Places(Mock())
    with patch.object(places, "_documents", return_value=[]) as tried, pytest.raises(UsageError):
        places.of_chunks("z " * 2000 + "row 9")
    assert tried.call_count == _MOST_SPLITS


def test_globs_are_one_pattern_and_unclosed_brackets_are_letters() -> None:
    names = ("/a/x.md", "/a/b/c.txt", "/notes", "/l/x.md#r1", "bx[", "y[]", "b[[z", "]", "[]v[", "[!]w[a")
    others = ("/a/c.txt", "/a/notes/x", "dx[", "a[[z", "y]")
    is_meant = _matcher(["*.md", "b/c.txt", "notes", "[a-c]x[", "y[]", "[!a][[z", "[]]", "[]v[", "[!]w[a"])
    assert [name for name in (*names, *others) if is_meant(name)] == [*names]


def test_a_follow_up_looks_back_at_few_questions() -> None:
    finder = Mock(rare_words=Mock(return_value=0))
    text = search_text("And?", [str(number) for number in range(5000)], finder)
    assert finder.rare_words.call_count == BACK + 1
    assert text.split()[:BACK] == [str(number) for number in range(5000 - BACK, 5000)]


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
def test_what_is_too_much_is_refused_in_few_words(client: httpx2.Client, path: str, value: dict[str, Any]) -> None:
    answer = client.post(path, json=value)
    assert answer.status_code in (400, 404), answer.text[:500]
    assert len(answer.content) < 20_000


def test_what_is_just_short_enough_is_taken(client: httpx2.Client) -> None:
    answer = client.post(
        CHAT, json=body(user="u" * LONGEST_NAME, metadata={"a": list(range(10_000))}, stop=["s" * 1000])
    )
    assert answer.status_code == 200, answer.text[:500]
    long = client.post(CHAT, json={"messages": [{"role": "user", "content": "mill " * (LONGEST_TEXT // 5)}]})
    assert long.status_code == 400
    assert "the model takes" in long.json()["error"]["message"]


def test_brackets_of_a_text_are_no_nesting(client: httpx2.Client) -> None:
    answer = client.post(
        CHAT, json={"messages": [{"role": "user", "content": f"{QUESTION} {'[{' * 500}"}], "max_tokens": 1}
    )
    assert answer.status_code == 200, answer.text[:500]


def test_a_long_request_is_read_beside_the_loop(client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, parsed = list[str](), wire._parsed
    monkeypatch.setattr(wire, "_parsed", lambda data: threads.append(threading.current_thread().name) or parsed(data))
    for metadata in ("short", "long" * 50_000):
        assert client.post(CHAT, json=body(metadata=metadata)).status_code == 200
    assert [name.startswith("kvtool-brief") for name in threads] == [False, True]


def test_health_does_not_wait_for_embeddings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of them may wait for the model: they do not take all threads."""
    go, waiting = threading.Event(), threading.Semaphore(0)

    def embed(words: Sequence[str]) -> tuple[list[Any], int]:
        waiting.release()
        assert go.wait(PATIENCE)
        return [], 0

    monkeypatch.setattr(type(served.engine), "embedder_name", "one")
    monkeypatch.setattr(served.engine, "embed", embed)
    with served.client as http, ThreadPoolExecutor(50) as pool:
        for _ in range(50):
            pool.submit(http.post, "/v1/embeddings", json={"input": "a"})
        try:
            assert waiting.acquire(timeout=PATIENCE)
            with served.client as other:
                assert other.get("/health").status_code == 200
                assert other.post(CHAT, json=body(metadata="long" * 50_000)).status_code == 200
        finally:
            go.set()


def test_a_shutdown_that_takes_too_long_is_ended() -> None:
    """A search for a pattern, for example, handles no signal and lets no thread run."""
    done = ended(
        "import re\nfrom kvtool.serve.server import limit_shutdown\nlimit_shutdown(0.1)\nre.match('(a|a)*b', 'a' * 60)"
    )
    assert done.returncode == -signal.SIGALRM
