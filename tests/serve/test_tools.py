"""Calls of tools and answers of a schema, with each API's official client, over a model of random numbers.

What it says is up to a grammar: without one it would never call anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import kvtool
from kvtool.core.errors import UsageError
from kvtool.core.model import constraint as constraint_module
from kvtool.core.model.constraint import Constraint
from kvtool.core.model.prompt import with_tools
from kvtool.core.query.options import QueryOptions
from kvtool.serve import chat as tools_module
from kvtool.serve.answers import Answer
from kvtool.serve.anthropic import MessageResponse
from kvtool.serve.chat import Hold, with_calls
from kvtool.serve.job import TokenCounts
from kvtool.serve.responses import ResponsesResponse
from kvtool.serve.wire import Refusal
from tests.cli.working import QUESTION
from tests.families import tiny_tokenizer
from tests.serve.conftest import KEY, PATIENCE, Served, ask_of_chat, ask_of_message, serving
from tests.wording import refused

anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")
pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"mill": {"$ref": "#/$defs/number"}, "how": {"enum": ["short", "long"]}},
    "required": ["mill", "how"],
    "additionalProperties": False,
    "$defs": {"number": {"enum": [1, 2, 3]}},
}
LOOK = {"name": "look_up", "description": 'The "mill" of a number.', "parameters": SCHEMA}
OTHER = {"name": "other", "description": "Anything else.", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": LOOK}, {"type": "function", "function": OTHER}]
NAMED: Any = {"type": "function", "function": {"name": "look_up"}}
TEXT = {"type": "string"}
ASKED: Any = {"role": "user", "content": QUESTION}


def is_of_schema(value: Any) -> bool:
    return value["mill"] in (1, 2, 3) and value["how"] in ("short", "long") and len(value) == 2


@pytest.fixture(scope="module")
def served(ready: Path) -> Iterator[Served]:
    with serving(ready, asking=QueryOptions(max_tokens=200)) as running:
        yield running


@pytest.fixture
def chat(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, timeout=PATIENCE, max_retries=0) as client:
        yield client


def test_a_call_of_openais_chat_and_its_result(chat: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS}
    done = chat.chat.completions.create(messages=[ASKED], tool_choice=NAMED, **asked)
    (choice,) = done.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "look_up")
    assert is_of_schema(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "Baker B. built it."}
    later = chat.chat.completions.create(messages=[ASKED, choice.message, result], **asked)
    assert later.choices[0].finish_reason in ("length", "stop")
    turn = later.model_extra["kvtool"]["turn"]
    assert (turn["number"], turn.get("reason")) == (2, None)  # the call is the turn that was kept
    assert turn["cached"] > turn["restored"]
    assert "Baker" not in turn["search"]  # a result is not searched


def test_a_schema_holds_openais_chat(chat: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "mill", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {"model": "tiny", "messages": [ASKED]}
    done = chat.chat.completions.create(response_format=form, **asked)
    assert is_of_schema(json.loads(done.choices[0].message.content))
    streamed = chat.chat.completions.create(response_format=form, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == done.choices[0].message.content
    warm = chat.chat.completions.create(response_format=form, temperature=1.5, seed=3, **asked)
    assert is_of_schema(json.loads(warm.choices[0].message.content))
    verified = chat.chat.completions.create(response_format=form, extra_body={"kvtool": {"verify": True}}, **asked)
    assert is_of_schema(json.loads(verified.choices[0].message.content))
    anything = chat.chat.completions.create(response_format={"type": "json_object"}, max_tokens=6, **asked)
    assert anything.choices[0].message.content.startswith("{")


def test_a_call_of_responses_and_its_result(chat: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", "strict": True, **LOOK}]}
    asked["tool_choice"] = {"type": "function", "name": "look_up"}
    done = chat.responses.create(input=QUESTION, **asked)
    (call,) = done.output
    assert (call.type, call.name, call.status) == ("function_call", "look_up", "completed")
    assert is_of_schema(json.loads(call.arguments))
    *_, last = events = list(chat.responses.create(input=QUESTION, stream=True, **asked))
    assert json.loads(last.response.output[0].arguments) == json.loads(call.arguments)
    (delta,) = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert delta == call.arguments
    asked |= {"tool_choice": "none", "max_output_tokens": 4}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Baker B. built it."}
    later = chat.responses.create(input=[result], previous_response_id=done.id, **asked)
    said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    again = chat.responses.create(input=[ASKED, said, result], **asked)
    assert later.output_text == again.output_text
    assert again.model_extra["kvtool"]["turn"]["number"] == 2


def test_a_call_of_anthropic_and_its_result(served: Served) -> None:
    tool = {"name": "look_up", "description": LOOK["description"], "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [tool]}
    with anthropic.Anthropic(base_url=served.url, api_key=KEY, timeout=PATIENCE, max_retries=0) as client:
        done = client.messages.create(messages=[ASKED], tool_choice={"type": "any"}, **asked)
        (call,) = done.content
        assert (done.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "look_up")
        assert is_of_schema(call.input)
        with client.messages.stream(messages=[ASKED], tool_choice={"type": "tool", "name": "look_up"}, **asked) as told:
            assert told.get_final_message().content[0].input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Baker B."}]}
        messages = [ASKED, {"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
        later = client.messages.create(**asked | {"messages": messages, "max_tokens": 4})
        assert later.model_extra["kvtool"]["turn"]["number"] == 2


def test_schemas_and_results_of_ollama(served: Served) -> None:
    with ollama.Client(served.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE) as client:
        assert is_of_schema(json.loads(client.chat("tiny", [ASKED], format=SCHEMA).message.content))
        assert is_of_schema(json.loads(client.generate("tiny", QUESTION, format=SCHEMA).response))
        assert client.chat("tiny", [ASKED], format="json", options={"num_predict": 6}).message.content.startswith("{")
        called = {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {"mill": 3}}}]}
        result = {"role": "tool", "tool_call_id": "1", "tool_name": "look_up", "content": "Baker B."}
        later = client.chat("tiny", [ASKED, called, result], tools=TOOLS, options={"num_predict": 4})
        assert later.eval_count == 4 or later.done_reason == "stop"


def test_passages_of_a_client_are_reused_beside_tools(chat: Any, served: Served, ready: Path) -> None:
    with kvtool.open(ready) as cache:
        passages = "\n\n".join(chunk.text for chunk in cache.query(QUESTION, max_tokens=1).chunks)
    own = {"role": "user", "content": f"{passages}\n\n{QUESTION}"}
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "system", "content": "Be short."}, own]}
    plain = chat.chat.completions.create(max_tokens=4, **asked)
    with_tools = chat.chat.completions.create(tools=TOOLS, tool_choice="required", **asked)
    assert with_tools.choices[0].message.tool_calls
    before, after = (done.model_extra["kvtool"] for done in (plain, with_tools))
    assert [chunk["id"] for chunk in after["chunks"]] == [chunk["id"] for chunk in before["chunks"]]
    assert after["tokens"]["prompt"] > before["tokens"]["prompt"] + 100  # the description of the tools
    assert "turn" not in after  # nothing was retrieved, and no conversation was made
    assert after["tokens"]["reused"] > 0


def linked(count: int, *between: dict[str, Any]) -> dict[str, Any]:
    """A schema of definitions, each of which has places for the next one."""
    made = [json.dumps(between).replace('"NEXT"', f'"#/$defs/{number + 1}"') for number in range(count)]
    definitions = [{"properties": dict(zip("pq", json.loads(each), strict=False))} for each in made]
    return {"$ref": "#/$defs/0", "$defs": {str(number): each for number, each in enumerate([*definitions, {}])}}


HARD: list[dict[str, Any]] = [  # what llguidance takes minutes for, or more stack than a process has
    linked(1000, {"$ref": "NEXT"}),
    linked(30, {"$ref": "NEXT", "minProperties": 0}, {"$ref": "NEXT", "minProperties": 0}),
    {"type": "integer", "multipleOf": 999_983},
    {"allOf": [{"type": "integer", "multipleOf": 997}, {"type": "integer", "multipleOf": 1009}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://a/", "allOf": [{"$ref": "#"}, {"type": "object"}]}}},
    {"allOf": [{"enum": [f"{n}" for n in range(3000)]}, {"enum": [f"{n}" for n in range(2999, -1, -1)]}]},
    {"allOf": [{"anyOf": [{"properties": {f"{n}{m}": {}}} for m in range(7)]} for n in range(4)]},
    {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(11)]},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "#/$defs/unheard"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    {"type": "object", "properties": {"n": TEXT, "a": {"$ref": "#/properties/a"}}, "required": ["n", "a"]},
]
USUAL: list[dict[str, Any]] = [
    linked(30, {"$ref": "NEXT"}, {"type": "array", "items": {"$ref": "NEXT"}}),
    linked(5, {"allOf": [{"$ref": "NEXT"}], "description": "x"}),
    linked(30, {"allOf": [{"$ref": "NEXT"}]}, {"allOf": [{"$ref": "NEXT"}, {"type": "object"}]}),
    {"type": "object", "properties": {"under": {"type": "array", "items": {"$ref": "#"}}}},
    {"type": "string", "enum": [f"{n}" for n in range(3000)]},
    {"anyOf": [{"properties": {"a": {"enum": [n]}}, "required": ["a"]} for n in range(300)]},
    {"properties": {"a": {"enum": ["x", "y"]}, "b": {"type": ["integer", "null"]}}, "anyOf": [{"required": ["a"]}, {}]},
    {
        "properties": {
            name: {"type": "number", "multipleOf": step} for name, step in (("a", 0.01), ("b", 5), ("c", 1e4))
        }
    },
    {"$id": "https://a/b", "properties": {"$ref": {"$ref": "#/%24defs/a~1b"}}, "$defs": {"a/b": {"type": "string"}}},
    {
        "$ref": "#/$defs/0",
        "$defs": {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(200)} | {"200": {}},
    },
]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "unheard"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": LOOK | {"parameters": TEXT}}]}, "tools.0.function.parameters"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": ["required"]}}, "tool_choice.tools.0"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": NAMED, "tools": [NAMED]}}, "tool_choice.mode"),
    ({"tools": TOOLS[:1] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {**LOOK, "parameters": {"title": "x" * 70_000}}}]}, "tools"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "unheard"}}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "kvtool": {"cite": True}}, "kvtool.cite"),
    (
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {}}]}, ASKED]},
        "messages.1.tool_calls.0.function.name",
    ),
    ({"messages": [ASKED, {"role": "tool", "content": [{"type": "image_url"}]}]}, "messages.1.content"),
    ({"messages": [ASKED, {"role": "tool", "content": [{"type": "text", "text": {"a": 1}}]}]}, "messages.1.content"),
    ({"messages": [ASKED, {"role": "tool", "content": "the result of no call"}]}, "messages.1"),
    *[
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": each}}}, "response_format")
        for each in HARD
    ],
    (
        {"tools": [{"type": "function", "function": {**LOOK, "parameters": HARD[0]}}], "tool_choice": "required"},
        "tool_choice",
    ),
]


@pytest.mark.some(12)
@pytest.mark.parametrize(
    ("body", "param"), REFUSED, ids=[f"{number}-{param}" for number, (_, param) in enumerate(REFUSED)]
)
def test_what_no_grammar_can_say_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as caught:
        ask_of_chat({"messages": [ASKED], **body})
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("schema", USUAL, ids=range(len(USUAL)))
def test_references_and_steps_that_are_usual(schema: dict[str, Any]) -> None:
    body = {"messages": [ASKED], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert ask_of_chat(body).options.grammar


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}], ids=str)
def test_stop_texts_do_not_cut_what_a_grammar_forces(more: dict[str, Any]) -> None:
    body = {"messages": [ASKED], "tools": TOOLS, "stop": ["\n"]}
    assert ask_of_chat(body).stop == ("\n",)
    assert ask_of_chat(body | more).stop == ()


def test_without_the_library_a_schema_is_refused_and_tools_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_module, "is_installed", lambda: False)
    with refused(Refusal):
        ask_of_chat({"messages": [ASKED], "tools": TOOLS, "tool_choice": "required"})
    assert len(ask_of_chat({"messages": [ASKED], "tools": TOOLS}).tools) == 2
    assert ask_of_chat({"messages": [ASKED], "tools": TOOLS, "tool_choice": "none"}).tools == ()


CALLED = '{"name": "look_up", "arguments": {"mill": 3}}'
SAID: list[tuple[str, str, int]] = [
    (f"<tool_call>\n{CALLED}\n</tool_call>", "", 1),
    (f"I look.\n<tool_call>{CALLED}</tool_call>\n<tool_call>{CALLED}</tool_call>", "I look.", 2),
    (f"<tool_call>{CALLED}", "", 1),  # its end mark was the end token
    (CALLED, "", 1),
    (CALLED.replace("arguments", "parameters"), "", 1),
    (f"<|python_tag|>{CALLED}", "", 1),
    (f"```json\n{CALLED}\n```", "", 1),
    (f"[TOOL_CALLS] [{CALLED}]", "", 1),
    (CALLED.replace("look_up", "unheard"), CALLED.replace("look_up", "unheard"), 0),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", 0),
    ('<tool_call>{"name": "look_up"', '<tool_call>{"name": "look_up"', 0),
    ("Baker B.", "Baker B.", 0),
    ("3", "3", 0),
    ("[]", "[]", 0),
]


@pytest.mark.parametrize(("text", "rest", "count"), SAID, ids=range(len(SAID)))
def test_calls_in_a_text(text: str, rest: str, count: int) -> None:
    answer = with_calls(Answer(text, "stop", (), (), {}, 0, "", 0.0, 0.0), TOOLS)
    assert (answer.text, len(answer.calls)) == (rest, count)
    assert all(call.arguments == {"mill": 3} for call in answer.calls)


@pytest.mark.parametrize(
    "value", ["[" * 100_000, '{"a":' * 100 + "1" + "}" * 100, r'"\ud800"', "NaN", "1e999"], ids=range(5)
)
def test_arguments_that_no_response_could_have(value: str) -> None:
    own = f'{{"name": "look_up", "arguments": {{"mill": {value}}}}}'
    for text in (own, f"<tool_call>{own}</tool_call>"):
        answer = with_calls(Answer(text, "stop", (), (), {}, 0, "", 0.0, 0.0), TOOLS)
        assert (answer.text, answer.calls) == (text, ())
    said = Answer(f"<tool_call>\n{own}\n</tool_call>", "stop", (), (), {}, 0, "", 0.0, 0.0)
    forced = with_calls(said, TOOLS, forced=True)
    assert (forced.text, [call.json for call in forced.calls]) == ("", [f'{{"mill": {value}}}'])
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": f'{{"mill": {value}}}'}}]}
    asked = ask_of_chat({"messages": [ASKED, call, {"role": "tool", "content": "x"}]})
    assert asked.turns == ((QUESTION, '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'),)


def test_events_name_the_items_of_their_response() -> None:
    """Also where full prefill has corrected a draft, of which some text was shown, to a call."""
    facts = {"tokens": {"prompt": 9, "generated": 5, "reused": 0}, "timing_ms": {}}
    answer = with_calls(Answer(CALLED, "stop", (), (), facts, 0, "", 0.0, 0.0), TOOLS)
    response = ResponsesResponse(None, ask_of_chat({"messages": [ASKED]}), "tiny", {"store": False}, print)  # type: ignore[arg-type]
    told = "".join([*response.beginning(TokenCounts(9)), *response.piece("Baker"), *response.end(answer)])
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
    done = [(event["output_index"], event["item"]) for event in events if event["type"] == "response.output_item.done"]
    assert done == [*enumerate(events[-1]["response"]["output"])]
    assert [item["type"] for _, item in done] == ["message", "function_call"]


@pytest.mark.parametrize("arguments", ["", '{"mill": ', '{"mill": 3, "how": "sho', '{"mill": 3,'])
def test_a_call_that_was_cut_off_can_be_sent_again(arguments: str) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": arguments}}]}
    asked = ask_of_chat({"messages": [ASKED, call, {"role": "tool", "content": "x"}]})
    assert asked.turns == ((QUESTION, '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'),)


def test_a_call_that_is_cut_off_has_empty_input_in_a_stream_of_anthropic_too() -> None:
    facts = {"tokens": {"prompt": 9, "generated": 5, "reused": 0}, "timing_ms": {}}
    answer = with_calls(Answer(f"<tool_call>\n{CALLED[:-3]}", "length", (), (), facts, 0, "", 0.0, 0.0), TOOLS)
    response = MessageResponse(None, None, "tiny")  # type: ignore[arg-type]
    assert response.whole(answer)["content"][0]["input"] == {}
    assert '"partial_json": "{}"' in "".join(response.end(answer))


def test_one_call_where_several_are_not_wanted() -> None:
    answer = Answer(f"<tool_call>{CALLED}</tool_call>" * 2, "stop", (), (), {}, 0, "", 0.0, 0.0)
    assert [len(with_calls(answer, TOOLS, several).calls) for several in (True, False)] == [2, 1]
    body: dict[str, Any] = {"messages": [ASKED], "tools": TOOLS}
    assert ask_of_chat(body).parallel
    assert not ask_of_chat(body | {"parallel_tool_calls": False}).parallel
    claude: dict[str, Any] = {"max_tokens": 4, "messages": [ASKED], "tools": [{"name": "a", "input_schema": {}}]}
    choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert not ask_of_message(claude | choice).parallel


def test_a_failed_tool_says_so_in_parts_too() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}
    for content in ("no luck", [{"type": "text", "text": "no luck"}]):
        result = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": content}
        body = {"max_tokens": 4, "messages": [ASKED, call, {"role": "user", "content": [result]}]}
        asked = ask_of_message(body).request.question
        assert asked == "<tool_response>\nError:\nno luck\n</tool_response>"


@pytest.mark.parametrize("text", [said for said, _, _ in SAID] + ["a < b <tool", "<|python", ""], ids=str)
def test_a_stream_holds_what_may_be_a_call(text: str) -> None:
    for size in (1, 3, 100):
        hold = Hold(TOOLS)
        shown = "".join(hold.piece(text[at : at + size]) for at in range(0, len(text), size))
        assert shown + hold.rest() == text
        assert "<tool_call" not in shown
        assert "look_up" not in shown
    assert Hold(()).piece(text) == text


def test_a_mark_that_is_a_token_is_called_by_it() -> None:
    """As in Qwen's vocabularies: the grammar is of the token, not of its letters."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    body = {"messages": [ASKED], "tools": TOOLS, "tool_choice": "required"}
    constraint = Constraint(ask_of_chat(body).options.grammar, tokenizer)
    constraint.begin()
    possible = constraint.masked(torch.zeros(len(tokenizer)))
    assert possible.isfinite().nonzero().flatten().tolist() == tokenizer.convert_tokens_to_ids(["<tool_call>"])
    constraint.take(int(possible.argmax()))
    following = constraint.masked(torch.zeros(len(tokenizer))).isfinite().nonzero().flatten().tolist()
    assert {tokenizer.decode(token)[:1] for token in following} == {"\n"}


def test_a_grammar_of_python(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvtool.open(ready) as cache:
        assert cache.query(QUESTION, max_tokens=20, grammar='start: "Baker " ("A" | "B") "."').answer in (
            "Baker A.",
            "Baker B.",
        )
        with pytest.raises(UsageError):
            cache.query(QUESTION, grammar="start: unheard")
        monkeypatch.setattr(constraint_module, "is_installed", lambda: False)
        with refused(UsageError):
            cache.query(QUESTION, grammar='start: "a"')


HERMES = (
    "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}{% if tools %}{{ '\n\n# Tools\n' }}"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}</s>{% else %}<|user|>{{ m.content }}</s>{% endif %}"
    "{% endfor %}<|assistant|>"
)
ELSEWHERE = HERMES.replace("{% if tools %}", "{% if false %}") + "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize("template", [None, HERMES, ELSEWHERE], ids=["none", "within", "elsewhere"])
def test_the_template_describes_tools_or_kvtool_does(template: str | None) -> None:
    tokenizer = tiny_tokenizer(chat=False)
    tokenizer.chat_template = template
    text = with_tools(tokenizer, "Be short.", TOOLS)
    assert text.startswith("Be short.\n\n# Tools\n")
    assert text.count('"look_up"') == 1
    assert ("<tools>" in text) is (template != HERMES)
