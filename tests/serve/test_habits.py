"""Requests as clients send them by habit: parameters of other servers, beginnings of answers, forms and counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic.types
import httpx2
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from kvtool.core.model.prompt import said_tokens
from kvtool.core.model.tokens import encode
from kvtool.core.query.options import QueryOptions
from kvtool.serve.chat import closed, with_calls
from kvtool.serve.job import Answer
from kvtool.serve.requests import IGNORED, NEUTRAL, SAMPLING
from kvtool.serve.wire import Refusal
from tests.cli.working import QUESTION
from tests.serve.conftest import KEY, Served, ask_of_chat, serving
from tests.wording import refused

ASKED = [{"role": "user", "content": QUESTION}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED},
    MESSAGES: {"messages": ASKED, "max_tokens": 8},
    RESPONSES: {"input": ASKED},
    "/api/chat": {"messages": ASKED, "stream": False},
    "/api/generate": {"prompt": QUESTION, "stream": False},
}
CALLED = [
    *ASKED,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "Well?"}]},
]
BIASES: list[tuple[str, Any]] = [("the", 1), ("5", 101), ("5", "much")]
HAVE_TOOLS = (CHAT, MESSAGES, RESPONSES)


def text_of(path: str, answer: dict[str, Any]) -> str:
    read: dict[str, Callable[[], str]] = {
        CHAT: lambda: answer["choices"][0]["message"]["content"],
        MESSAGES: lambda: answer["content"][0]["text"],
        RESPONSES: lambda: answer["output"][0]["content"][0]["text"],
        "/api/chat": lambda: answer["message"]["content"],
        "/api/generate": lambda: answer["response"],
    }
    return read[path]()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", BODIES)
def test_neutral_and_ignored_parameters_change_no_answer(path: str, client: httpx2.Client) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if name not in BODIES[path]}
    ignored = dict.fromkeys(["keep_alive", "num_ctx", "session_id", "timeout", "provider", "service_tier"], 7)
    chosen = {"tools": [], "tool_choice": {"type": "auto"} if path == MESSAGES else "auto"}
    more = {"response_format": {"type": "text"}, "logit_bias": {}, "seed": None, "stop": None}
    chosen |= more if path == CHAT else {}
    assert ignored.keys() <= set(IGNORED)
    plain = client.post(path, json=BODIES[path])
    habitual = client.post(path, json=neutral | ignored | (chosen if path in HAVE_TOOLS else {}) | BODIES[path])
    assert habitual.status_code == 200, habitual.text
    assert text_of(path, habitual.json()) == text_of(path, plain.json())


@pytest.mark.parametrize("path", BODIES)
def test_other_values_are_refused_by_name(path: str, client: httpx2.Client) -> None:
    wrong = {"n": 2, "use_beam_search": True, "think": True, "suffix": "x", "guided_json": {}, "stop_token_ids": [3]}
    wrong |= {"background": True, "conversation": "c", "container": "c", "typical_p": 0.5}
    for name, value in wrong.items():
        refused = client.post(path, json=BODIES[path] | {name: value})
        assert refused.status_code == 400
        assert name in refused.text


def test_sampling_parameters_are_options_of_the_question() -> None:
    given = {name: 1 for name in SAMPLING if "max" not in name and name != "n_predict"} | {"max_completion_tokens": 5}
    options = ask_of_chat({"messages": ASKED, "max_tokens": 9, **given}).options
    assert (options.max_tokens, options.sampled_tokens, options.min_p) == (5, 1, 1)
    assert (options.repetition_penalty, options.repeat_last_n, options.min_tokens) == (1, 1, 1)
    endless = ask_of_chat({"messages": ASKED, "ignore_eos": True, "top_k": -1, "n_predict": -1})
    assert endless.options.min_tokens > 10**9
    assert not endless.options.stop_repeats
    assert (endless.options.sampled_tokens, endless.options.max_tokens) == (0, 2**31 - 1)
    lengths = {"max_tokens": 3, "n_predict": -1, "max_completion_tokens": -1}
    assert ask_of_chat({"messages": ASKED, **lengths}).options.max_tokens == 3


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),  # which needs `logprobs`
        (CHAT, {"logprobs": "yes"}, "logprobs"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "look"}}]}, "tools.0.type"),
        (CHAT, {"top_p": 1.5}, "top_p"),
        *((CHAT, {"logit_bias": {token: bias}}, f"logit_bias.{token}") for token, bias in BIASES),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        *(
            (CHAT, {name: value}, name)
            for name in ("user", "safety_identifier")
            for value in (5, True, ["a"], {"a": "b"})
        ),
        (CHAT, {"repeat_penalty": 0}, "repeat_penalty"),
        (CHAT, {"kvtool": {"ratio": 2}}, "kvtool.ratio"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        *((RESPONSES, {"max_output_tokens": wrong}, "max_output_tokens") for wrong in (0, "5")),
        (CHAT, {"stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
        (CHAT, {"tools": [{"type": "function", "function": {"x": 5}}]}, "tools.0.function.x"),
        (RESPONSES, {"input": [{"type": "reasoning"}, {"role": "user", "content": 5}]}, "input.1.content"),
        (RESPONSES, {"previous_response_id": "resp_none"}, "previous_response_id"),
        (MESSAGES, {"output_config": {"format": {}}}, "output_config.format"),
        (MESSAGES, {"tools": [{"name": "a b"}]}, "tools.0.name"),
        (MESSAGES, {"tools": [{"name": "f", "parameters": {}}]}, "tools.0.parameters"),
        (MESSAGES, {"messages": [*CALLED, {"role": "user", "content": 5}]}, "messages.3.content"),
        (MESSAGES, {"stop_sequences": ["x"] * 17}, "stop_sequences"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"messages": [{"role": "system", "content": "x"}, *ASKED]}, "role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        ("/api/chat", {"options": {"mirostat": 2}}, "mirostat"),
        *(("/api/chat", {"format": form}, "format") for form in ({"type": "unheard"}, "xml")),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        *(("/api/chat", {"messages": []} | wrong, "") for wrong in ({"options": "x"}, {"stream": "x"}, {"tools": "x"})),
        *(("/api/chat", {"messages": wrong}, "messages") for wrong in ({}, 0, False, "")),
        ("/api/generate", {"prompt": 0}, "prompt"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict"),
        *(("/api/chat", {"keep_alive": wrong}, "keep_alive") for wrong in ([], {}, "abc", "5x")),
    ],
)
def test_an_error_names_what_the_client_sent(path: str, more: dict[str, Any], name: str, client: httpx2.Client) -> None:
    refused = client.post(path, json=BODIES[path] | more)
    error = refused.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert refused.status_code == (404 if name == "previous_response_id" else 400)
    assert name.removesuffix(".content") in message or name == "previous_response_id"
    assert not {"response_format", "tool_calls"} & {*message.split()}
    assert "--" not in message
    if path in (CHAT, RESPONSES):
        assert error["param"] == name


def test_any_model_name_is_answered_if_the_server_allows_it(ready: Path) -> None:
    with serving(ready, any_model=True) as served, served.client as client:
        for path, body in BODIES.items():
            assert client.post(path, json=body | {"model": "gpt-4o"}).status_code == 200
        assert client.get("/v1/models/gpt-4o").status_code == 200
        assert client.post("/api/show", json={"model": "llama3"}).json()["name"] == "tiny:latest"


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_a_body_without_a_type_is_json_unless_a_page_sends_it(kind: str | None, served: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"} | ({} if kind is None else {"Content-Type": kind})
    with httpx2.Client(base_url=served.url, timeout=60) as client:
        assert client.post("/api/chat", content=json.dumps(BODIES["/api/chat"]), headers=headers).status_code == 200
        page = headers | {"Origin": served.url}
        assert client.post("/api/chat", content=json.dumps(BODIES["/api/chat"]), headers=page).status_code == 415


def test_a_compressed_body_is_refused(client: httpx2.Client) -> None:
    assert client.post(CHAT, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}).status_code == 415


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/api/chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_beginning_of_an_answer_is_continued(
    path: str, stream: bool, client: httpx2.Client, says: Callable[[str], None]
) -> None:
    says(" was the baker.")
    begun = [*ASKED, {"role": "assistant", "content": "It "}]
    said = client.post(path, json=BODIES[path] | {"messages": begun, "stream": stream})
    assert said.status_code == 200, said.text
    if not stream:
        text = text_of(path, said.json())
    elif path == "/api/chat":
        text = "".join(json.loads(line)["message"]["content"] for line in said.text.splitlines())
    else:
        steps = [event.get("choices", [event])[0].get("delta", {}) for event in events_of(said.text)]
        text = "".join(step.get("text") or step.get("content") or "" for step in steps)
    assert text == " was the baker."


def test_the_beginning_of_an_answer_ends_the_prompt(served: Served) -> None:
    passage = "The third mill was built in 1762 by baker A. It grinds flour.\n\n" * 8
    for question in (QUESTION, f"{passage}{QUESTION}"):
        asked = [{"role": "user", "content": question}]
        with served.client as client:
            first = client.post(CHAT, json={"messages": asked}).json()
            begun = [*asked, {"role": "assistant", "content": "It was Baker"}]
            later = client.post(CHAT, json={"messages": begun}).json()
        tokens = len(said_tokens(served.engine.scheduler._model.session().tokenizer, "It was Baker"))
        assert later["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens"] == tokens


def test_a_continued_answer_is_no_cached_conversation(ready: Path) -> None:
    later = {"role": "user", "content": "And the other?"}
    with serving(ready) as served, served.client as client:
        begun = [*ASKED, {"role": "assistant", "content": "It was"}]
        said = text_of(CHAT, client.post(CHAT, json={"messages": begun}).json())
        assert client.get("/health").json()["conversations"] == 0
        messages = [*ASKED, {"role": "assistant", "content": f"It was{said}"}, later]
        assert client.post(CHAT, json={"messages": messages}).json()["kvtool"]["turn"]["cached"] == 0


@pytest.mark.parametrize(
    "more", [{"kvtool": {"cite": True}}, {"response_format": {"type": "json_object"}}], ids=["cite", "schema"]
)
def test_a_prefilled_answer_has_no_citations_and_no_schema(more: dict[str, Any]) -> None:
    begun = {"messages": [*ASKED, {"role": "assistant", "content": "It"}]}
    with refused(Refusal):
        ask_of_chat(begun | more)
    assert not ask_of_chat(begun, QueryOptions(cite=True)).options.cite


def test_a_response_that_was_continued_is_remembered_whole(served: Served) -> None:
    for begun in ("It was ", "", None):
        asked = {"input": [*ASKED, {"role": "assistant", "content": begun}]}
        with served.client as client:
            first = client.post(RESPONSES, json=asked)
            assert first.status_code == 200, first.text
            later = {"input": ASKED, "previous_response_id": first.json()["id"]}
            counted = client.post(f"{RESPONSES}/input_tokens", json=later).json()["input_tokens"]
            said = f"{(begun or '').rstrip()}{text_of(RESPONSES, first.json())}"
            whole = [*ASKED, {"role": "assistant", "content": said}, *ASKED]
            assert client.post(f"{RESPONSES}/input_tokens", json={"input": whole}).json()["input_tokens"] == counted


def test_assistant_messages_at_the_end_begin_the_answer_together() -> None:
    empty = ask_of_chat({"messages": [*ASKED, {"role": "assistant", "content": None}]})
    assert (empty.request.question, empty.request.prefill, empty.turns) == (QUESTION, "", ())
    begun = [{"role": "assistant", "content": text} for text in ("It was ", "", "Baker")]
    assert ask_of_chat({"messages": [*ASKED, *begun]}).request.prefill == "It was\n\nBaker"
    with refused(Refusal):
        ask_of_chat({"messages": begun})
    later = ask_of_chat({"messages": [*ASKED, *begun, {"role": "system", "content": "Be brief."}]})
    assert (later.request.prefill, later.options.system) == ("It was\n\nBaker", "Be brief.")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
    with refused(Refusal):
        ask_of_chat({"messages": [*ASKED, call, *begun]})


def test_thinking_of_other_models_is_dropped(client: httpx2.Client) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}
    bare = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    habits = {"max_tokens": None, "thinking": {"type": "adaptive", "display": "omitted"}}
    bodies = [habits | {"messages": [*ASKED, one, *ASKED]} for one in (said, bare)]
    counts = [client.post(f"{MESSAGES}/count_tokens", json=body).json() for body in bodies]
    assert counts[0] == counts[1]
    assert counts[0]["input_tokens"]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    body = {"input": [*ASKED, reasoning, *ASKED], "include": ["reasoning.encrypted_content"]}
    assert client.post(RESPONSES, json=body).status_code == 200


def test_objects_have_only_the_members_that_they_name() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    shut = inner | {"additionalProperties": False}
    assert closed({"properties": {"x": inner, "y": {"items": inner}}})["properties"] == {
        "x": shut,
        "y": {"items": shut},
    }
    assert closed({"$defs": {"a": inner}, "$ref": "#/$defs/a"})["$defs"] == {"a": shut}
    assert closed({"anyOf": [inner, {"type": "null"}]}) == {"anyOf": [shut, {"type": "null"}]}
    for kept in ({"type": "object"}, inner | {"additionalProperties": True}, {"enum": [{"properties": {"a": 1}}]}):
        assert closed(kept) == kept
    for merged in ({"allOf": [inner]}, inner | {"anyOf": [{"required": ["a"]}]}, {"properties": {"x": {"not": {}}}}):
        assert closed(merged) == merged


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}]
CALL, CUT = (
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": ',
)


@pytest.mark.parametrize(
    ("text", "calls", "said"),
    [
        (CUT + '{"city": "Hal', ['{"city": "Hal'], ""),
        ("It is so.\n" + CUT, [""], "It is so."),
        (CUT + '{"city": "Halden"}}\n</tool', ['{"city": "Halden"}'], ""),
        ('<tool_call>\n{"name": "wea', [], ""),
        (CALL * 2 + CUT[:-5], ["{}", "{}"], ""),
    ],
)
def test_a_call_that_is_cut_off_has_the_arguments_so_far(text: str, calls: list[str], said: str) -> None:
    answer = with_calls(Answer(text, "length", (), (), {}, 0, "", 0.0, 0.0), TOOLS)
    assert [(call.name, call.json) for call in answer.calls] == [("weather", each) for each in calls]
    assert (answer.text, answer.finish) == (said, "length")


def test_a_stream_shows_no_markup_of_a_call_that_is_cut_off(ready: Path, says: Callable[[str], None]) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for text, said in (('It is.\n<tool_call>\n{"na', "It is."), ('<tool_call>\n{"name": "we', ""), ("<tool", "")):
        says(text + "x" * 400)
        with serving(ready) as served, served.client as client:
            length = len(encode(served.engine.scheduler._model.session().tokenizer, text))
            body = {"messages": ASKED, "tools": tools, "max_tokens": length}
            body |= {"tool_choice": "auto" if "_call" in text else "required"}
            whole = client.post(CHAT, json=body).json()["choices"][0]
            events = events_of(client.post(CHAT, json=body | {"stream": True}).text)
        shown = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert (whole["message"]["content"], whole["finish_reason"], shown) == (said, "length", said)


def test_only_allowed_tools_are_offered() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    nested = {"allowed_tools": {"mode": "auto", "tools": [tools[1]]}}
    for choice in ({"mode": "auto", "tools": [{"type": "function", "name": "b"}]}, nested):
        body = {"messages": ASKED, "tools": tools, "tool_choice": {"type": "allowed_tools"} | choice}
        assert [tool["function"]["name"] for tool in ask_of_chat(body).tools] == ["b"]


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (CHAT, lambda schema: {"response_format": {"type": "json_object", "schema": schema}}),
        (CHAT, lambda schema: {"response_format": {"type": "json_schema", "schema": schema}}),
        (MESSAGES, lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        (RESPONSES, lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}),
    ],
)
def test_a_schema_has_several_forms(path: str, form: Any, client: httpx2.Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    said = client.post(path, json=BODIES[path] | {"max_completion_tokens": 20} | form(schema))
    assert json.loads(text_of(path, said.json())).keys() == {"ok"}


def test_a_forced_call_in_a_stream_has_no_empty_content(client: httpx2.Client) -> None:
    parameters = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    body = BODIES[CHAT] | {"tools": tools, "tool_choice": "required", "stream": True, "max_tokens": 120}
    events = events_of(client.post(CHAT, json=body).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "" not in [delta.get("content") for delta in deltas]
    (call,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert json.loads(call["function"]["arguments"]).keys() == {"ok"}


def test_counted_tokens_are_those_of_a_prompt_without_passages(ready: Path) -> None:
    asked = [{"role": "user", "content": "Zounds?"}]  # which no document has
    turns = [*asked, {"role": "assistant", "content": "Baker."}, {"role": "user", "content": "Gadzooks?"}]
    with serving(ready) as served, served.client as client:
        for messages in (asked, turns):
            counts = [
                client.post(f"{MESSAGES}/count_tokens", json={"messages": messages, "system": "Be brief."}),
                client.post(f"{RESPONSES}/input_tokens", json={"input": messages, "instructions": "Be brief."}),
            ]
            body = {"messages": [{"role": "system", "content": "Be brief."}, *messages], "max_tokens": 1}
            used = client.post(CHAT, json=body).json()["usage"]
            assert [count.json()["input_tokens"] for count in counts] == [used["prompt_tokens"]] * 2


def test_a_stream_of_messages_begins_with_the_count_of_its_end(client: httpx2.Client) -> None:
    events = events_of(client.post(MESSAGES, json=BODIES[MESSAGES] | {"stream": True}).text)
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert begun["input_tokens"] > 0
    assert begun == ended | {"output_tokens": 0}


def test_models_are_listed_as_each_client_expects(client: httpx2.Client) -> None:
    assert client.get("/v1/models/").json()["object"] == "list"
    listed = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    (row,) = listed["data"]
    assert client.get("/v1/models/tiny", headers={"anthropic-version": "2023-06-01"}).json() == row
    missing = client.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})
    assert (row["type"], row["id"], listed["has_more"]) == ("model", "tiny", False)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_ollamas_requests_without_a_question_name_what_they_ask_for(client: httpx2.Client) -> None:
    for path, empty in (("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
        for keep, reason in ((None, "load"), ("10m", "load"), (0, "unload"), ("0m", "unload"), (False, "unload")):
            body = empty | ({} if keep is None else {"keep_alive": keep})
            said = client.post(path, json=body | {"model": "tiny"}).json()
            assert (said["done"], said["done_reason"]) == (True, reason), body
            assert client.post(path, json=body | {"model": "other"}).status_code == 404


# Required members of Open Responses' `ResponseResource` (openresponses.org, 2026-04-24).
RESOURCE = set(
    "id object status model truncation service_tier created_at completed_at top_logprobs max_output_tokens "
    "max_tool_calls temperature top_p presence_penalty frequency_penalty parallel_tool_calls store background "
    "previous_response_id user safety_identifier prompt_cache_key incomplete_details error reasoning usage output "
    "tools instructions tool_choice text metadata".split()
)


def test_a_response_has_every_member_of_its_schema(client: httpx2.Client) -> None:
    tool = {"type": "function", "name": "look"}
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}}
    for more in ({}, {"tools": [tool], "text": form}, {"reasoning": {"effort": "low"}, "max_output_tokens": 1}):
        body = BODIES[RESPONSES] | more
        whole = client.post(RESPONSES, json=body).json()
        events = events_of(client.post(RESPONSES, json=body | {"stream": True}).text)
        assert {"response.created", "response.in_progress"} <= {event["type"] for event in events}
        for response in (whole, *(event["response"] for event in events if "response" in event)):
            assert response.keys() >= RESOURCE
            openai.types.responses.Response.model_validate(response)
            for tool in response["tools"]:
                assert tool.keys() >= {"type", "name", "description", "parameters", "strict"}
            if "text" in more:
                assert response["text"]["format"].keys() >= {"name", "description", "schema", "strict"}


def test_a_remembered_response_can_be_read(client: httpx2.Client) -> None:
    made = client.post(RESPONSES, json={"input": [{"role": "user", "content": "Hello"}, *ASKED]}).json()
    place = f"{RESPONSES}/{made['id']}"
    assert client.get(place).json() == made
    items = client.get(f"{place}/input_items").json()
    assert [item["content"][0]["text"] for item in items["data"]] == [QUESTION, "Hello"]
    later = client.get(f"{place}/input_items", params={"order": "asc", "limit": 1}).json()
    assert (later["data"][0], later["has_more"]) == (items["data"][1], True)
    rest = client.get(f"{place}/input_items", params={"order": "asc", "after": later["last_id"]}).json()
    assert (rest["data"], rest["has_more"]) == ([items["data"][0]], False)
    for query in ("limit=0", "limit=abc", "order=xyz", "after=nowhere"):
        refused = client.get(f"{place}/input_items?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0])
    for missing in ("", "/input_items"):
        unknown = client.get(f"{RESPONSES}/resp_none{missing}")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, None)
    assert client.get(place, headers={"Authorization": f"Bearer {KEY}x"}).status_code == 401


FORMS: list[tuple[str, dict[str, Any], Any, Any]] = [
    (CHAT, {"logprobs": True}, openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    ("/v1/completions", {"prompt": QUESTION}, openai.types.Completion, dict),  # its events have no type of their own
    (RESPONSES, {}, openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
    (MESSAGES, {}, anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
]


@pytest.mark.parametrize(("path", "more", "whole", "event"), FORMS, ids=[form[0] for form in FORMS])
def test_answers_and_events_are_of_the_types_of_their_api(
    path: str, more: dict[str, Any], whole: Any, event: Any, client: httpx2.Client
) -> None:
    body = BODIES.get(path, {}) | more
    TypeAdapter(whole).validate_python(client.post(path, json=body).json())
    events = events_of(client.post(path, json=body | {"stream": True}).text)
    assert len(events) > 3
    for each in events:
        if each.get("type") != "ping":  # of Anthropic's API, but not of its types
            TypeAdapter(event).validate_python(each)
