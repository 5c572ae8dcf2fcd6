"""Verified answers of a server: what stands at the end is full prefill's answer, as the client asked for it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Answer, Ask
from tests.cli.working import QUESTION, kvtool
from tests.serve.asking import ask, stream
from tests.serve.conftest import Served, of_shell, wait_until
from tests.serve.test_openai import ASKED, client

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
    with pytest.raises(openai.BadRequestError, match="verify and temperature exclude each other"):
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
    full, done = kvtool(*at, "--fusion", "full").fine(), kvtool(*at, "--fusion", "reuse", "--verify").fine()
    assert done.out == f"{full.out.strip()}\n"
    assert "verified: full prefill accepts" in done.err
