"""Clients of other APIs, each with its official package: the same answers, and by name what is not supported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

import kvtool
from kvtool.core.errors import KvtoolError
from kvtool.serve.answers import Listening
from kvtool.serve.chat import Message
from kvtool.serve.responses import Exchange, Remembered
from kvtool.serve.wire import Refusal
from tests.cli.working import QUESTION
from tests.serve.conftest import KEY, PATIENCE, Served, serving
from tests.serve.test_openai import expected
from tests.wording import refused

__all__ = ["expected"]
anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")

Turn = tuple[str, str]
LATER = "Who has built the other one?"


@dataclass
class Said:
    """What a client has got: the text, why it ended, tokens of the prompt and of the answer, and kvtool's facts."""

    text: str
    end: str
    prompt: int
    generated: int
    facts: dict[str, Any]


_OPEN: list[Any] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


class OfResponses:
    error = openai.APIStatusError
    ends = ("incomplete", "completed")

    def __init__(self, served: Served, key: str = KEY) -> None:
        self.client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, timeout=PATIENCE, max_retries=0)
        _OPEN.append(self.client)

    def ask(self, turns: list[Turn], system: str = "", most: int = 8, stream: bool = False, **more: Any) -> Said:
        asked = {
            "model": "tiny",
            "input": [{"role": role, "content": text} for role, text in turns],
            "instructions": system or None,
            "max_output_tokens": most,
            "extra_body": more,
        }
        if stream:
            events = list(self.client.responses.create(**asked, stream=True))
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert [event.sequence_number for event in events] == list(range(len(events)))
            done = events[-1].response
            if done.error:  # the client leaves that to its user
                raise openai.OpenAIError(done.error.message)
            assert text == done.output_text
        else:
            done = self.client.responses.create(**asked)
        usage = done.usage
        return Said(done.output_text, done.status, usage.input_tokens, usage.output_tokens, done.model_extra["kvtool"])


class OfAnthropic:
    error = anthropic.APIStatusError
    ends = ("max_tokens", "end_turn")

    def __init__(self, served: Served, key: str = KEY) -> None:
        self.client = anthropic.Anthropic(base_url=served.url, api_key=key, timeout=PATIENCE, max_retries=0)
        _OPEN.append(self.client)

    def ask(self, turns: list[Turn], system: str = "", most: int = 8, stream: bool = False, **more: Any) -> Said:
        asked = {
            "model": "tiny",
            "messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns],
            "max_tokens": most,
            "extra_body": more,
            **({"system": system} if system else {}),
        }
        if stream:
            facts: dict[str, Any] = {}
            with self.client.messages.stream(**asked) as events:
                text = ""
                for event in events:
                    if event.type == "content_block_delta":
                        text += event.delta.text
                    if event.type == "message_delta":
                        facts = event.model_extra["kvtool"]
                done = events.get_final_message()
            assert text == done.content[0].text
        else:
            done = self.client.messages.create(**asked)
            facts = done.model_extra["kvtool"]
        usage = done.usage
        prompt = usage.input_tokens + usage.cache_read_input_tokens
        return Said(done.content[0].text, done.stop_reason, prompt, usage.output_tokens, facts)


class OfOllama:
    error = ollama.ResponseError
    ends = ("length", "stop")

    def __init__(self, served: Served, key: str = KEY) -> None:
        self.client = ollama.Client(served.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)
        _OPEN.append(self.client)

    def ask(self, turns: list[Turn], system: str = "", most: int = 8, stream: bool = False, **more: Any) -> Said:
        messages = [{"role": role, "content": text} for role, text in [("system", system)] * bool(system) + turns]
        options = {"num_predict": most, "num_ctx": 4096, **more.pop("options", {})}
        body = {"model": "tiny:latest", "messages": messages, "options": options, "stream": stream, **more}
        if not stream:
            row = self.client._request_raw("POST", "/api/chat", json=body).json()
            return self._said(ollama.ChatResponse(**row), row["message"]["content"], row["kvtool"])
        rows = list(self.client.chat("tiny:latest", messages, options=options, stream=True))
        return self._said(rows[-1], "".join(row.message.content for row in rows), {})

    @staticmethod
    def _said(last: Any, text: str, facts: dict[str, Any]) -> Said:
        assert last.total_duration >= last.prompt_eval_duration > 0
        return Said(text, last.done_reason, last.prompt_eval_count, last.eval_count, facts)


DIALECTS: list[Any] = [OfResponses, OfAnthropic, OfOllama]
each = pytest.mark.parametrize("client", DIALECTS, ids=["responses", "anthropic", "ollama"])


@each
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_that_of_a_query(client: Any, stream: bool, served: Served, expected: str) -> None:
    said = client(served).ask([("user", QUESTION)], stream=stream)
    assert (said.text, said.end, said.generated) == (expected, client.ends[0], 8)
    if said.facts:
        assert said.prompt == said.facts["tokens"]["prompt"]
        assert said.facts["sources"][0].endswith("mill2.md:1")


@each
def test_instruction_turns_and_options(client: Any, served: Served) -> None:
    turns, system = [("user", QUESTION), ("assistant", "Baker B."), ("user", LATER)], "Answer in one word."
    chat = OfResponses(served).client.chat
    own = {"kvtool": {"fusion": "epic", "link_tokens": 4, "top_k": 2}}
    messages: Any = [{"role": role, "content": text} for role, text in [("system", system), *turns]]
    other = chat.completions.create(model="tiny", messages=messages, max_tokens=6, extra_body=own)
    said = client(served).ask(turns, system, 6, **own)
    assert said.text == other.choices[0].message.content
    assert said.facts["tokens"]["prompt"] == other.model_extra["kvtool"]["tokens"]["prompt"]
    assert said.facts["fusion"] == "epic"


@each
def test_the_key_and_the_model_are_checked(client: Any, served: Served) -> None:
    with refused(client.error) as wrong:
        client(served, "another").ask([("user", QUESTION)])
    assert wrong.value.status_code == 401
    with refused(client.error) as unknown:
        client(served).ask([("user", QUESTION)], model="other")
    assert unknown.value.status_code == 404


@each
def test_a_stream_that_has_to_wait_stays_readable(
    client: Any, served: Served, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, waits = Listening.next, iter([True, False] * 4)

    async def late(self: Any, timeout: float | None = None) -> Any:
        return None if next(waits, False) else await told(self, timeout)

    monkeypatch.setattr(Listening, "next", late)
    assert client(served).ask([("user", QUESTION)], stream=True).text == expected
    assert next(waits, None) is None


def test_a_stop_sequence_is_named(served: Served, expected: str) -> None:
    middle = next(letter for letter in expected[len(expected) // 2 :] if letter.isascii() and letter.isalnum())
    done = OfAnthropic(served).client.messages.create(
        model="tiny", max_tokens=8, messages=[{"role": "user", "content": QUESTION}], stop_sequences=[middle, "zzyzx"]
    )
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", middle)
    assert OfOllama(served).ask([("user", QUESTION)], options={"stop": [middle]}).end == "stop"


def test_responses_are_remembered_for_their_owner(ready: Path) -> None:
    with serving(ready, f"{KEY}\nother") as served:
        own, other = OfResponses(served).client, OfResponses(served, "other").client
        asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 6}
        first = own.responses.create(input=QUESTION, **asked)
        second = own.responses.create(input=LATER, previous_response_id=first.id, instructions="One word.", **asked)
        turns = [("user", QUESTION), ("assistant", first.output_text), ("user", LATER)]
        assert second.output_text == OfResponses(served).ask(turns, "One word.", 6).text
        assert second.model_extra["kvtool"]["turn"]["cached"] == 0  # another instruction; without one the cache is used
        third = own.responses.create(input=LATER, previous_response_id=first.id, **asked)
        assert third.model_extra["kvtool"]["turn"]["cached"] > 0
        with refused(openai.NotFoundError):
            other.responses.create(input=LATER, previous_response_id=first.id, **asked)
        own.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            own.responses.delete(first.id)
        unkept = own.responses.create(input=QUESTION, store=False, **asked)
        with pytest.raises(openai.NotFoundError):
            own.responses.create(input=LATER, previous_response_id=unkept.id, **asked)


def test_the_oldest_responses_are_forgotten() -> None:
    kept = Remembered(limit=200)
    for number in range(5):
        kept.keep("me", str(number), Exchange([Message("user", "x" * 50)], [], {}))
    assert kept.find("me", "4").messages[0].text == "x" * 50
    with pytest.raises(Refusal):
        kept.find("me", "0")
    with pytest.raises(Refusal):
        kept.find("you", "4")


def test_ollamas_other_endpoints(served: Served, expected: str) -> None:
    client = OfOllama(served).client
    assert [model.model for model in client.list().models] == ["tiny:latest"]
    done = client.generate("tiny", QUESTION, options={"num_predict": 8})
    assert (done.response, done.done_reason, done.eval_count) == (expected, "length", 8)
    rows = list(client.generate("tiny", QUESTION, options={"num_predict": 8}, stream=True))
    assert "".join(row.response for row in rows) == expected
    with refused(ollama.ResponseError) as caught:
        client.embed("tiny", "a text")
    assert caught.value.status_code == 404


def test_an_editor_finds_the_model_by_ollamas_api(served: Served) -> None:
    """In the order in which VS Code asks: it refuses a version before 0.6.4, and plans prompts by the context."""
    client = OfOllama(served).client
    with served.client as web:
        version = web.get("/api/version").json()
        bodies = ({"model": "kvtool"}, {"name": "tiny"}, {"model": "tiny:latest", "verbose": False})
        named = [web.post("/api/show", json=body).json()["model_info"] for body in bodies]
        wrong = [web.post("/api/show", json=body) for body in ({}, {"model": ""}, {"model": ":latest"})]
    assert [int(part) for part in version["version"].split(".")] >= [0, 6, 4]
    assert version["kvtool"] == kvtool.__version__
    assert [(answer.status_code, list(answer.json())) for answer in wrong] == [(404, ["error"])] * 3
    (listed,) = client.list().models
    decoder = served.engine.decoder
    assert decoder is not None
    shown = client.show(listed.model)
    architecture = shown.modelinfo["general.architecture"]
    assert (architecture, shown.details.family) == (decoder.config.model_type,) * 2
    assert shown.modelinfo[f"{architecture}.context_length"] == decoder.context
    assert shown.modelinfo["general.basename"] == "tiny"
    assert shown.modelinfo["general.parameter_count"] == sum(weight.numel() for weight in decoder.model.parameters())
    assert shown.capabilities == ["completion", "tools"]
    assert shown.parameters == f"num_ctx {decoder.context}"
    assert shown.template == decoder.loaded.tokenizer.chat_template
    assert named == [shown.modelinfo] * 3
    (running,) = client.ps().models
    assert (running.name, running.digest) == ("tiny:latest", decoder.loaded.fingerprint)
    assert running.size == sum(one.nbytes for one in decoder.model.parameters())
    assert (running.size_vram, running.context_length) == (0, decoder.context)
    assert running.expires_at.year > 2100


@each
def test_an_error_within_a_stream_is_the_clients_own(
    client: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, seen = Listening.next, list[int]()

    async def fail_after_one(self: Any, timeout: float | None = None) -> Any:
        if seen:
            raise KvtoolError("no luck", "none at all")
        seen.append(1)
        return await told(self, timeout)

    monkeypatch.setattr(Listening, "next", fail_after_one)
    with refused(client.error, openai.OpenAIError, anthropic.APIError):
        client(served).ask([("user", QUESTION)], stream=True)
