"""Answers of OpenAI's chat: as a query's, with its options and log-probabilities, and verified by full prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import kvtool
from kvtool.core.model.generate import stop_ids
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Answer, Ask
from kvtool.serve.wire import Refusal
from tests.cli.working import QUESTION, chunks_of
from tests.cli.working import kvtool as command
from tests.serve.conftest import KEY, PATIENCE, Served, ask, of_shell, serving, stream, wait_until
from tests.wording import refused

ASKED = [{"role": "user", "content": QUESTION}]


def client_of(served: Served, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, timeout=PATIENCE, max_retries=0)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


@pytest.fixture(scope="module")
def expected(ready: Path) -> str:
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


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve("kvtool").owned_by == "kvtool"  # requests may name it so
    with refused(openai.NotFoundError):
        client.models.retrieve("org/another")


def test_errors_are_the_clients_own(client: openai.OpenAI, served: Served) -> None:
    with refused(openai.NotFoundError):
        client.chat.completions.create(model="gpt-7", messages=ASKED)
    for wrong in ({"fusion": "glue"}, {"topk": 3}, {"chunks": ["00" * 20]}, {"chunks": ["a"], "documents": ["b"]}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"kvtool": wrong})
    with refused(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=ASKED, logit_bias={"99999999": 1})
    with refused(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=QUESTION, logprobs=0)
    for nothing in ([], [{"role": "assistant", "content": "I"}], [{"role": "user", "content": " "}]):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=nothing)
    with client_of(served, "kv-another") as stranger, refused(openai.AuthenticationError):
        stranger.models.list()


def test_sampling_follows_what_a_client_sends(client: openai.OpenAI, ready: Path) -> None:
    asked = {"top_p": 0.2, "frequency_penalty": 1.5, "presence_penalty": 1.0, "temperature": 1.9, "seed": 5}
    own = {"documents": ["mill2.md"]}

    def say(**sent: Any) -> str:
        done = client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=24, extra_body={"kvtool": own}, **sent
        )
        return str(done.choices[0].message.content)

    with kvtool.open(ready) as cache:
        expected = cache.query(QUESTION, documents=["mill2.md"], max_tokens=24, **asked).answer
        token = cache.query(QUESTION, documents=["mill2.md"], max_tokens=1).generated.ids[0]
    assert say(**asked) == expected
    assert len({say(**{**asked, **one}) for one in ({"top_p": 1}, {"frequency_penalty": 0}, {})}) == 3
    plain = say()
    assert say(logit_bias={token: -100}) != plain
    forced = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=8, logit_bias={token: 100})
    assert forced.choices[0].message.content.count(plain[:1]) >= 8
    assert say(seed=-1) == plain  # clients send it for any seed, which a temperature of 0 does not use


def test_log_probabilities(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "model": "tiny", "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    done = client.chat.completions.create(**asked)
    rows = done.choices[0].logprobs.content
    assert len(rows) == done.usage.completion_tokens
    assert done.choices[0].message.content == "".join(row.token for row in rows).strip()
    for row in rows:
        best = [one.logprob for one in row.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert (row.token, row.logprob) == (row.top_logprobs[0].token, best[0])  # greedily
        assert row.logprob < 0
        assert row.bytes is None or bytes(row.bytes).decode() == row.token  # None: a part of a character
    *_, last = client.chat.completions.create(**asked, stream=True)
    assert last.choices[0].logprobs.content == rows
    biased = client.chat.completions.create(**asked, temperature=1.5, presence_penalty=1, seed=3)
    first = biased.choices[0].logprobs.content[0]
    assert [one.logprob for one in first.top_logprobs] == [one.logprob for one in rows[0].top_logprobs]
    assert client.chat.completions.create(**asked | {"top_logprobs": None}).choices[0].logprobs.content[0].bytes
    with refused(openai.BadRequestError):
        client.chat.completions.create(**asked | {"top_logprobs": 21})


@pytest.mark.slow
def test_an_answer_may_take_what_is_left_of_the_context(client: openai.OpenAI, served: Served) -> None:
    decoder = served.engine._loaded.decoder
    assert decoder is not None
    own = {"kvtool": {"documents": ["mill2.md"], "stop_repeats": False}}
    endless = {"max_tokens": 10**9, "logit_bias": dict.fromkeys(stop_ids(decoder), -100)}
    done = client.chat.completions.create(model="tiny", messages=ASKED, extra_body=own, **endless)
    assert (done.choices[0].finish_reason, done.usage.total_tokens) == ("length", decoder.context)
    turns: list[Any] = [*ASKED, {"role": "assistant", "content": "baker A"}, *ASKED]
    done = client.chat.completions.create(model="tiny", messages=turns, extra_body=own, **endless)
    assert (done.choices[0].finish_reason, done.usage.total_tokens) == ("length", decoder.context)
    assert done.model_extra["kvtool"]["turn"]["number"] == 2  # it has not started over for so long an answer
    full: list[Any] = [*ASKED, {"role": "assistant", "content": "baker A " * (decoder.context // 2 - 60)}, *ASKED]
    told = client.chat.completions.create(model="tiny", messages=full, extra_body=own, **endless).model_extra["kvtool"]
    assert "it starts over" in told["warnings"][0]["message"]
    too_long: list[Any] = [{"role": "user", "content": "mill " * decoder.context}]
    with refused(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=too_long, max_tokens=5)


def test_errors_name_options_and_leave_names_as_they_are() -> None:
    said = "the model's --top-k is wrong for '--my-notes'", "leave --no-shift out, or run `kvtool ingest --level raw`"
    error = Refusal(400, "wrong", *said).to_json()
    assert error["message"].startswith("the model's top_k is wrong for '--my-notes' (")
    assert error["hint"] == "leave shift = false out, or run `kvtool ingest --level raw`"


def test_a_greeting_is_answered_without_passages(ready: Path) -> None:
    said: list[dict[str, Any]] = [{"role": "user", "content": "Hi there!"}]
    strict = {"kvtool": {"strict": True}}
    with serving(ready) as served, client_of(served) as client:
        for sent in ({}, {"kvtool": {"fusion": "auto"}}, {"kvtool": {"defer": True}}, {"kvtool": {"slo_ms": 5000}}):
            done = client.chat.completions.create(model="tiny", messages=said, extra_body=sent)
            told = done.model_extra["kvtool"]
            assert (told["retrieval"], told["chunks"], told["sources"]) == ("none", [], [])
            assert done.usage.completion_tokens > 0
        answer = done.choices[0].message.content
        assert client.completions.create(model="tiny", prompt="xyzzy").model_extra["kvtool"]["retrieval"] == "none"
        with refused(openai.NotFoundError):
            client.chat.completions.create(model="tiny", messages=said, extra_body=strict)
        turns: list[Any] = [*said, {"role": "assistant", "content": answer}, *ASKED]
        told = client.chat.completions.create(model="tiny", messages=turns).model_extra["kvtool"]
        assert "retrieval" not in told
        assert told["chunks"]
    with serving(ready, strict=True) as served, client_of(served) as client:
        with refused(openai.NotFoundError):
            client.chat.completions.create(model="tiny", messages=said)
        told = client.chat.completions.create(
            model="tiny", messages=said, extra_body={"kvtool": {"strict": False}}
        ).model_extra["kvtool"]
        assert told["retrieval"] == "none"


def test_embeddings_where_there_is_an_embedder(store: Path, built: Path, static_model: Path) -> None:
    with serving(store) as served, client_of(served) as client:
        with refused(openai.NotFoundError):
            client.embeddings.create(model="any", input="mill")
        with kvtool.open(store) as cache:
            cache.ingest(built / "corpus", embedder=str(static_model))
        model = str(static_model)
        assert [each.id for each in client.models.list()] == ["tiny", model]
        assert client.models.retrieve(model).id == model
        packed = client.embeddings.create(model=model, input=["mill", "river"])  # Base64
        plain = client.embeddings.create(model=model, input=["mill", "river"], encoding_format="float")
        assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0
        longer = client.embeddings.create(model=model, input=["mill mill mill", "river"])
        assert longer.usage.prompt_tokens == packed.usage.prompt_tokens + 2
        assert [row.embedding for row in packed.data] == [row.embedding for row in plain.data]
        assert sum(number**2 for number in plain.data[0].embedding) == pytest.approx(1, abs=1e-5)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=model, input=[])


__all__ = ["client"]
OTHER = "What does the fifth mill grind?"
REUSE, FULL = {"fusion": "reuse", "verify": True}, {"fusion": "full"}


def asked(client: openai.OpenAI, messages: Any, own: dict[str, Any], **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, extra_body={"kvtool": own}, **more)


def test_only_the_text_that_stands(client: openai.OpenAI) -> None:
    full, done = (asked(client, ASKED, own, logprobs=True, top_logprobs=2) for own in (FULL, REUSE))
    draft = asked(client, ASKED, {"fusion": "reuse"})
    assert draft.choices[0].message.content != full.choices[0].message.content
    assert done.choices[0].to_dict() == full.choices[0].to_dict()  # log-probabilities, too
    verified = done.model_extra["kvtool"]["verified"]
    assert (verified["corrected"], verified["draft"]) == (True, draft.choices[0].message.content)
    assert done.usage.completion_tokens == full.usage.completion_tokens


def test_a_stream_ends_with_what_stands(client: openai.OpenAI) -> None:
    full, draft = (asked(client, ASKED, {"fusion": mode}).choices[0].message.content for mode in ("full", "reuse"))
    *chunks, last = asked(client, ASKED, REUSE, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == draft
    verified = last.model_extra["kvtool"]["verified"]
    assert (verified["answer"], verified["draft"]) == (full, draft)
    *chunks, last = asked(client, ASKED, {"ratio": 1.0, "verify": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == full
    assert last.model_extra["kvtool"]["verified"]["corrected"] is False
    assert "answer" not in last.model_extra["kvtool"]["verified"]


def test_a_stop_text_ends_both(client: openai.OpenAI) -> None:
    full = asked(client, ASKED, FULL).choices[0].message.content
    middle = next(letter for letter in full[len(full) // 2 :] if letter != "\ufffd")
    expected, done = (asked(client, ASKED, own, stop=[middle]).choices[0] for own in (FULL, REUSE))
    assert (done.message.content, done.finish_reason) == (expected.message.content, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_temperature_is_refused(client: openai.OpenAI, stream: bool) -> None:
    with refused(openai.BadRequestError):
        asked(client, ASKED, REUSE, temperature=0.7, stream=stream)


@pytest.mark.parametrize("between", [False, True])
def test_a_conversation_is_that_of_full(served: Served, client: openai.OpenAI, between: bool) -> None:
    """Whether its turns are held or, here because others were asked, computed again."""
    said = []
    for own in (FULL, REUSE):
        messages: list[Any] = list(ASKED)
        for question in ("And when was it built?", OTHER):
            done = asked(client, messages, own)
            messages += [{"role": "assistant", "content": done.choices[0].message.content}]
            messages += [{"role": "user", "content": question}]
            if between:
                served.engine.conversations.clear()
        last = asked(client, messages, own)
        assert (last.model_extra["kvtool"]["turn"]["cached"] == 0) is between
        said.append([*(message["content"] for message in messages), last.choices[0].message.content])
    assert said[0] == said[1]


def test_several_at_a_time_and_one_that_leaves(served: Served) -> None:
    engine, scheduler = served.engine, served.engine.scheduler
    full = [ask(engine, Ask(Request(text), QueryOptions(fusion="full", max_tokens=9))) for text in (QUESTION, OTHER)]
    options = QueryOptions(fusion="reuse", max_tokens=9, verify=True)
    left, *going = [stream(engine, Ask(Request(text), options)) for text in (QUESTION, QUESTION, OTHER)]
    assert isinstance(next(left), str)
    firsts = [next(one) for one in going]
    left.close()  # type: ignore[attr-defined]
    answers = [list(one)[-1] for one in going]
    assert all(isinstance(first, str) for first in firsts)
    assert [answer.text for answer in answers if isinstance(answer, Answer)] == [one.text for one in full]
    wait_until(lambda: not scheduler.running and not scheduler.waiting)


def test_a_shell_prints_what_stands(served: Served, ready: Any) -> None:
    assert of_shell(verify=True)["options"] == {"verify": True}
    at = ("query", QUESTION, "--store", ready, "--max-tokens", "6")
    full, done = command(*at, "--fusion", "full").fine(), command(*at, "--fusion", "reuse", "--verify").fine()
    assert done.out == f"{full.out.strip()}\n"
    assert "verified: full prefill accepts" in done.err
