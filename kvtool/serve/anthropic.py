"""The messages API of Anthropic."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import Answers, ChatRequest, Dialect, about, cached_tokens
from kvtool.serve.job import Answer, Call, PromptTokens
from kvtool.serve.openai import read_chat
from kvtool.serve.parameters import ENDLESS, SAMPLING, check_parameters
from kvtool.serve.tools import text_of
from kvtool.serve.wire import ANTHROPIC_PATH, Refusal, body_of, check_names, error_body, renamed, taken, texts

_SAME = ("model", "stream", "kvtool", ENDLESS, *SAMPLING)  # as in OpenAI's chat
_KNOWN = ("messages", "system", "stop_sequences", "tools", "tool_choice", "output_config", *_SAME)
_TOOL = ("name", "description", "input_schema", "type", "cache_control", "strict")
_THINKING = ("thinking", "redacted_thinking")  # blocks that only the model reads that has written them


def read_message(value: Mapping[str, Any], options: QueryOptions, strict: bool) -> ChatRequest:
    check_parameters(value, _KNOWN)
    if taken(value, "max_tokens", int, 0) < 1:
        raise Refusal(400, "missing", "max_tokens is missing or below 1", "the most tokens of an answer", "max_tokens")
    given = enumerate(taken(value, "messages", list, []))
    named = [(f"messages.{number}", each) for number, one in given for each in _messages(one, f"messages.{number}")]
    system = text_of(value.get("system") or "", "system")
    stops = list(texts(value, "stop_sequences"))
    user = taken(taken(value, "metadata", dict, {}), "user_id", str, where="metadata.")
    same = {name: value.get(name) for name in _SAME}
    # Its `effort` is a model's that thinks.
    form = taken(taken(value, "output_config", dict, {}), "format", dict, where="output_config.")
    chat = {**same, "messages": [each for _, each in named], "stop": stops, "user": user, "response_format": form}
    own = {"stop": "stop_sequences", "response_format": "output_config.format"}
    with renamed(function="", parameters="input_schema", tool_calls="", **own):
        return read_chat(chat | _tools(value), options, strict, system, [where for where, _ in named])


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _tools(value: Mapping[str, Any]) -> dict[str, Any]:
    tools = []
    for number, tool in enumerate(taken(value, "tools", list, [])):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise Refusal(400, "unsupported", f"tools.{number} is no tool of the client", param=f"tools.{number}")
        check_names(tool, _TOOL, where=f"tools.{number}.")
        own = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        tools.append({"type": "function", "function": own})
    choice = taken(value, "tool_choice", dict, {})
    check_names(choice, ("type", "name", "disable_parallel_tool_use"), where="tool_choice.")
    kind = choice.get("type", "auto")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chosen = {"tools": tools, "tool_choice": named if kind == "tool" else _CHOICES.get(str(kind), kind)}
    is_single = taken(choice, "disable_parallel_tool_use", bool, False, where="tool_choice.")
    return chosen | {"parallel_tool_calls": not is_single}


def _messages(message: Any, where: str) -> list[Any]:
    """Return a message as OpenAI has it: the results of tools are messages of their own. Raises Refusal."""
    if isinstance(message, dict) and message.get("role") not in ("user", "assistant"):
        what = f"{where} has another role than user or assistant"
        raise Refusal(400, "unsupported", what, "instructions go into `system`", f"{where}.role")
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    calls, results, rest = (list[Any]() for _ in range(3))
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in _THINKING:
            (calls if kind == "tool_use" else results if kind == "tool_result" else rest).append(block)
    if (calls and message["role"] == "user") or (results and message["role"] == "assistant"):
        raise Refusal(400, "unsupported", f"{where} has calls or results of the other role", param=where)
    said = {"role": message["role"], "content": rest or ""}
    if calls:
        said["tool_calls"] = [
            {"type": "function", "function": {"name": block.get("name"), "arguments": block.get("input")}}
            for block in calls
        ]
    told = [{"role": "tool", "content": _result(block)} for block in results]
    return [*told, said] if rest or calls or not told else told


def _result(block: Mapping[str, Any]) -> Any:
    content = block.get("content") or ""
    if not block.get("is_error"):
        return content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [{"type": "text", "text": "Error:"}, *parts]


@dataclass(slots=True)
class MessageResponse(Dialect):
    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _is_open: bool = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        content = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
        content += [_tool_use(call) for call in answer.calls]
        return self._message(content) | _end(answer) | {"usage": _usage_of(answer), "kvtool": about(answer)}

    def beginning(self, prompt: PromptTokens) -> Iterator[str]:
        yield _event("message_start", message=self._message([]) | {"usage": _usage(prompt.prompt, prompt.cached, 0)})

    def piece(self, text: str) -> Iterator[str]:
        yield from self._open()
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def waiting(self) -> str:
        return _event("ping")

    def end(self, answer: Answer) -> Iterator[str]:
        if not answer.calls:
            yield from self._open()
        if self._is_open:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(answer.calls, int(self._is_open)):
            yield _event("content_block_start", index=index, content_block=_tool_use(call) | {"input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call.arguments, ensure_ascii=False)}
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_end(answer), usage=_usage_of(answer), kvtool=about(answer))
        yield _event("message_stop")

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield _event(**error_body(refusal, ANTHROPIC_PATH))

    def _open(self) -> Iterator[str]:
        if not self._is_open:
            self._is_open = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        own = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return own | {"stop_reason": None, "stop_sequence": None}


def _event(type: str, **values: Any) -> str:
    return f"event: {type}\ndata: {json.dumps({'type': type, **values}, ensure_ascii=False)}\n\n"


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _end(answer: Answer) -> dict[str, str | None]:
    if answer.calls and answer.finish == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": "max_tokens" if answer.finish == "length" else "end_turn", "stop_sequence": None}


def _usage(prompt: int, cached: int, generated: int) -> dict[str, int]:
    counts = {"input_tokens": prompt - cached, "output_tokens": generated}
    return counts | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _usage_of(answer: Answer) -> dict[str, int]:
    tokens = answer.facts["tokens"]
    return _usage(tokens["prompt"], cached_tokens(answer), tokens["generated"])


class Anthropic:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def message(self, request: Request) -> Response:
        return await self._answers.answered(request, read_message, lambda _, model: MessageResponse(model))

    async def count(self, request: Request) -> Response:
        value = await body_of(request)
        value["max_tokens"] = value.get("max_tokens") or 1
        return JSONResponse({"input_tokens": await self._answers.count(value, read_message)})
