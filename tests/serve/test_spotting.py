"""A client that pastes passages into its messages gets their stored KV, and no others are retrieved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from tests.cli.working import QUESTION
from tests.serve.conftest import Served, serving


@pytest.fixture
def pasted(ready: Path) -> list[dict[str, str]]:
    with Store.open(ready) as store:
        documents = [each for each in store.documents() if each.source.endswith(("mill4.md", "mill1.md"))]
    passages = "\n".join(f"[{number}] {each.text[: each.chunks[1].end]}" for number, each in enumerate(documents, 1))
    return [{"role": "system", "content": "Answer shortly."}, {"role": "user", "content": f"{passages}\n{QUESTION}"}]


def said(served: Served, messages: list[dict[str, str]], **own: Any) -> Any:
    body = {"messages": messages, "max_tokens": 4, "kvtool": own}
    with served.client as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def names(answer: Any) -> list[str]:
    return [Path(chunk["source"]).name for chunk in answer["kvtool"]["chunks"]]


def test_pasted_passages_are_reused_where_they_are(ready: Path, pasted: list[dict[str, str]]) -> None:
    with serving(ready) as served:
        answer = said(served, pasted)
        assert names(answer) == ["mill1.md", "mill1.md", "mill4.md", "mill4.md"]
        assert {chunk["status"] for chunk in answer["kvtool"]["chunks"]} == {"hit"}
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        taken = sum(chunk["tokens"] for chunk in answer["kvtool"]["chunks"])
        assert 0.7 * taken < cached <= taken < answer["usage"]["prompt_tokens"]
        assert answer["kvtool"]["warnings"] == []
        without = said(served, pasted, spot=False)
        assert len(names(without)) == 5
        assert without["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]
        named = said(served, pasted, documents=["mill0.md"])
        assert {*names(named)} == {"mill0.md"}
    with serving(ready, spot=False) as served:
        assert names(said(served, pasted)) == names(without)


def test_a_conversation_whose_passages_are_in_an_earlier_turn(ready: Path, pasted: list[dict[str, str]]) -> None:
    later = [*pasted, {"role": "assistant", "content": "A miller."}, {"role": "user", "content": "When was it?"}]
    with serving(ready) as served:
        assert names(said(served, later)) == ["mill1.md", "mill1.md", "mill4.md", "mill4.md"]
        assert {*names(said(served, [{"role": "user", "content": QUESTION}]))} == {"mill2.md"}


def test_what_is_ingested_and_what_is_removed_while_it_serves(
    ready: Path, pasted: list[dict[str, str]], tmp_path: Path
) -> None:
    own = Path(shutil.copytree(ready, tmp_path / "own"))
    with serving(own) as served:
        assert "mill4.md" in names(said(served, pasted))
        with Store.open(own) as store, store.writer() as writer:
            (gone,) = [source for source in store.sources() if source.endswith("mill4.md")]
            writer.remove_documents([gone])
        answer = said(served, pasted)
        assert {*names(answer)} == {"mill1.md"}
