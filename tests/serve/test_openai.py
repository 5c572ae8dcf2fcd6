"""The server as the `openai` client sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import kvtool
from tests.cli.working import QUESTION, chunks_of, drop_records
from tests.serve.conftest import KEY, PATIENCE, Served, serving

ASKED = [{"role": "user", "content": QUESTION}]


def client_of(served: Served, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, timeout=PATIENCE, max_retries=0)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


@pytest.fixture(scope="module")
def expected(ready: Path) -> str:
    """What is answered without a server."""
    with kvtool.open(ready) as cache:
        return cache.query(QUESTION, max_tokens=8).answer


def test_a_chat_is_answered_as_a_query_is(client: openai.OpenAI, expected: str) -> None:
    done = client.chat.completions.create(model="tiny", messages=ASKED)
    assert done.choices[0].message.content == expected
    assert done.choices[0].finish_reason == "length"
    assert done.model == "tiny"
    said = done.model_extra["kvtool"]
    assert said["sources"][0].endswith("mill2.md:1")
    assert [chunk["status"] for chunk in said["chunks"]] == ["hit"] * 4
    assert done.usage.prompt_tokens == said["tokens"]["prompt"]
    assert done.usage.prompt_tokens_details.cached_tokens == said["tokens"]["reused"] > 0
    assert said["timing_ms"]["ttft"] > 0
    assert said["warnings"] == []


def test_a_stream_brings_the_same_piece_by_piece(client: openai.OpenAI, expected: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=ASKED, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected
    assert len([piece for piece in pieces if piece]) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-2].model_extra["kvtool"]["tokens"]["generated"] == 8
    assert chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_completion_is_the_question_alone(client: openai.OpenAI, expected: str) -> None:
    assert client.completions.create(model="tiny", prompt=QUESTION).choices[0].text == expected
    pieces = client.completions.create(model="tiny", prompt=QUESTION, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == expected


def test_options_of_a_question(client: openai.OpenAI, ready: Path) -> None:
    own = {"documents": ["mill1.md"], "fusion": "epic", "link_tokens": 4}
    done = client.chat.completions.create(model="kvtool", messages=ASKED, max_tokens=3, extra_body={"kvtool": own})
    said = done.model_extra["kvtool"]
    assert said["fusion"] == "epic"
    assert {Path(chunk["source"]).name for chunk in said["chunks"]} == {"mill1.md"}
    assert done.usage.completion_tokens <= 3
    chunk = chunks_of(ready, "mill4.md")[0]
    own = {"chunks": [chunk], "level": "raw"}
    done = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=1, extra_body={"kvtool": own})
    assert [each["id"] for each in done.model_extra["kvtool"]["chunks"]] == [chunk]


def test_a_stop_ends_an_answer(client: openai.OpenAI, expected: str) -> None:
    middle = next(letter for letter in expected[len(expected) // 2 :] if letter != "\ufffd")
    done = client.chat.completions.create(model="tiny", messages=ASKED, stop=[middle])
    assert done.choices[0].message.content == expected[: expected.index(middle)].rstrip("\ufffd").strip()
    assert done.choices[0].finish_reason == "stop"


def test_a_loop_is_a_stop(client: openai.OpenAI, says: Callable[[str], None]) -> None:
    once = "The mill was built by Anna Reeve, who came from Brennick with two mules."
    says(f"{once} " * 4)
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 400}
    done = client.chat.completions.create(**asked)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (once, "stop")
    assert done.model_extra["kvtool"]["finish"] == "repeat"
    *chunks, last = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == once
    assert (last.choices[0].finish_reason, last.model_extra["kvtool"]["finish"]) == ("stop", "repeat")
    done = client.chat.completions.create(**asked, extra_body={"kvtool": {"stop_repeats": False}})
    assert done.choices[0].message.content.count(once) == 4


def test_samples_are_drawn_by_their_seed(client: openai.OpenAI) -> None:
    def say(seed: int) -> str | None:
        done = client.chat.completions.create(model="tiny", messages=ASKED, temperature=1.5, seed=seed)
        return done.choices[0].message.content

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(4)}) > 1


def test_what_was_said_before_stands_in_the_prompt(client: openai.OpenAI) -> None:
    def tokens(*messages: Any) -> int:
        own = {"kvtool": {"documents": ["mill2.md"]}}
        done = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=own)
        return done.model_extra["kvtool"]["tokens"]["prompt"]

    before = {"role": "user", "content": "Who built the first mill?"}, {"role": "assistant", "content": "baker A"}
    assert tokens(*before, *ASKED) > tokens(*ASKED)
    parts = [{"type": "text", "text": QUESTION}]
    assert tokens({"role": "user", "content": parts}) == tokens(*ASKED)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_misses_say_why(store: Path) -> None:
    drop_records(store, *chunks_of(store, "mill2.md"))
    with serving(store) as served, client_of(served) as client:
        done = client.chat.completions.create(
            model="tiny", messages=ASKED, extra_body={"kvtool": {"documents": ["mill2.md"]}}
        )
    said = done.model_extra["kvtool"]
    assert {chunk["status"] for chunk in said["chunks"]} == {"miss"}
    assert all(chunk["reason"] == "not stored" for chunk in said["chunks"])
    assert "mill2.md" in said["sources"][0]


def test_errors_are_the_clients_own(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.chat.completions.create(model="gpt-7", messages=ASKED)
    for wrong in ({"fusion": "glue"}, {"topk": 3}, {"chunks": ["00" * 20]}, {"chunks": ["a"], "documents": ["b"]}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"kvtool": wrong})
    for refused in ({"n": 2}, {"top_p": 0.5}, {"logprobs": True}, {"max_tokens": 10**9}, {"max_tokens": 0}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=ASKED, **refused)
    for nothing in ([], [{"role": "assistant", "content": "I"}], [{"role": "user", "content": " "}]):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=nothing)
    with client_of(served, "kv-another") as stranger, pytest.raises(openai.AuthenticationError, match="--show-key"):
        stranger.models.list()


def test_neutral_values_are_taken(client: openai.OpenAI, expected: str) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=ASKED, n=1, top_p=1, presence_penalty=0, user="somebody", tools=[], logprobs=False
    )
    assert done.choices[0].message.content == expected


def test_embeddings_where_there_is_an_embedder(store: Path, built: Path, static_model: Path) -> None:
    with serving(store) as served, client_of(served) as client:
        with pytest.raises(openai.NotFoundError, match="no embedding model"):
            client.embeddings.create(model="any", input="mill")
        with kvtool.open(store) as cache:
            cache.ingest(built / "corpus", embedder=str(static_model))
        model = str(static_model)
        assert [each.id for each in client.models.list()] == ["tiny", model]
        packed = client.embeddings.create(model=model, input=["mill", "river"])  # Base64
        plain = client.embeddings.create(model=model, input=["mill", "river"], encoding_format="float")
        assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0
        longer = client.embeddings.create(model=model, input=["mill mill mill", "river"])
        assert longer.usage.prompt_tokens == packed.usage.prompt_tokens + 2
        assert [row.embedding for row in packed.data] == [row.embedding for row in plain.data]
        assert sum(number**2 for number in plain.data[0].embedding) == pytest.approx(1, abs=1e-5)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=model, input=[])
