"""A server's store with a size budget: what does not fit is refused, and nothing else suffers from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.upkeep.forget import pin
from kvtool.serve.job import Ask
from tests.cli.working import QUESTION
from tests.serve.asking import ask
from tests.serve.conftest import serving, wait_until
from tests.serve.test_uploads import DOCUMENTS, client, send, served, sources, uploads

__all__ = ["client", "served", "uploads"]
QUICK = Ask(Request(QUESTION), QueryOptions(max_tokens=4))  # no conversation


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


def test_of_several_those_that_fitted_stay(store: Path, uploads: Path, client: httpx2.Client) -> None:
    owners = sources(client)
    leave(store, 2 * 2**20)
    rows = [{"name": f"{number:02}.md", "text": text_of(number)} for number in range(30)]
    full(client.post(DOCUMENTS, json={"documents": rows}))
    listed = sources(client) - owners
    assert listed == {str(path) for path in uploads.glob("*.md")}


def test_a_budget_smaller_than_the_store(store: Path, uploads: Path) -> None:
    with kvtool.open(store) as cache:
        cache.set_budget(1000)
    before = kept(store)
    with serving(store, uploads=uploads) as served, served.client as client:
        answers(client)
        full(send(client, "a.md", "The kite is in Oslo."))
        answers(client)
        assert not list(uploads.glob("*.md"))
    assert kept(store) == before


def test_a_hole_is_not_filled_over_the_budget(store: Path) -> None:
    """A question of its own, as a shell asks it, stores what it had to compute."""
    with Store.open(store) as opened, opened.writer() as writer:
        writer.drop_level([*opened.chunk_ids()], "raw")
    with kvtool.open(store) as cache:
        cache.set_budget(1000)
    with serving(store) as served:
        ask(served.engine, QUICK)
        wait_until(lambda: any("could not be stored" in text and "over its budget" in text for text in served.warnings))
        assert not any(kept(store).values())
        with kvtool.open(store) as cache:
            cache.set_budget(None)
        ask(served.engine, QUICK)
        wait_until(lambda: any(kept(store).values()))


def test_a_name_that_is_sent_twice_at_once_leaves_the_former_version(
    client: httpx2.Client, store: Path, uploads: Path
) -> None:
    assert send(client, "note.md", "The first version.").status_code == 200
    leave(store, 100)
    rows = [{"name": "note.md", "text": f"{word} " * 2000} for word in ("second", "third")]
    answer = client.post(DOCUMENTS, json={"documents": rows})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
    assert (uploads / "note.md").read_text() == "The first version."
