"""The responses API of OpenAI: one input, one response, and conversations that the server remembers."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import Answers, ChatRequest, Dialect, about, cached_tokens
from kvtool.serve.job import Answer, Call, PromptTokens
from kvtool.serve.openai import read_chat
from kvtool.serve.parameters import ENDLESS, SAMPLING, USER, check_parameters
from kvtool.serve.tools import text_of
from kvtool.serve.wire import LONGEST_TEXT, Refusal, body_of, check_names, renamed, taken, texts

_SAME = ("model", "stream", "kvtool", "parallel_tool_calls", ENDLESS, *SAMPLING, *USER)  # as in OpenAI's chat
_TOOLS = ("tools", "tool_choice", "text")
_KNOWN = ("input", "instructions", "previous_response_id", "include", *_TOOLS, *_SAME)
_FOREIGN = ("reasoning.encrypted_content",)  # of other models, which kvtool never has
_TEXTS = ("input_text", "output_text", "text")  # types of a part of a message
_ECHOED = (
    *("instructions", "max_output_tokens", "previous_response_id", "user", "safety_identifier", "prompt_cache_key"),
    *("reasoning", "max_tool_calls"),
)
_TYPES = {"store": bool, "metadata": dict, "reasoning": dict, "max_tool_calls": int, "prompt_cache_key": str}
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_TOOL = {"description": None, "parameters": None, "strict": None}
_FORMAT = {"name": "answer", "description": None, "schema": None, "strict": False}
_MOST_BYTES = 64 << 20  # of remembered conversations, all together

Message = dict[str, Any]
"""A message as in OpenAI's chat."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A response that is remembered: the messages up to it and its own, the items of its input, and its object."""

    messages: list[Message]
    input: list[dict[str, Any]]
    response: dict[str, Any]


class Remembered:
    """Responses by name, the latest ones up to some bytes; each owner has its own."""

    def __init__(self, limit: int = _MOST_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._held: OrderedDict[tuple[str, str], str] = OrderedDict()

    def keep(self, owner: str, name: str, exchange: Exchange) -> None:
        self._held[owner, name] = text = json.dumps(asdict(exchange))
        self._bytes += len(text)
        while self._bytes > self._limit:
            self._bytes -= len(self._held.popitem(last=False)[1])

    def exchange(self, owner: str, name: str, param: str | None = None) -> Exchange:
        if (text := self._held.get((owner, name))) is None:
            hint = "send all messages as `input`; the server remembers responses until it ends, unless store is false"
            raise Refusal(404, "previous_response_not_found", f"there is no response {name!r}", hint, param)
        self._held.move_to_end((owner, name))
        return Exchange(**json.loads(text))

    def forget(self, owner: str, name: str) -> None:
        self.exchange(owner, name)
        self._bytes -= len(self._held.pop((owner, name)))


def _input_messages(value: Mapping[str, Any]) -> dict[str, Message]:
    """Return the messages of an input by their paths in it."""
    given = _items(value)
    if not given:
        raise Refusal(400, "missing", "input is missing or empty", "a text, or a list of messages", "input")
    # Only the model reads `reasoning` that has written it.
    return {
        (where := f"input.{number}"): _message(item, where)
        for number, item in enumerate(given)
        if not isinstance(item, dict) or item.get("type") != "reasoning"
    }


def _items(value: Mapping[str, Any]) -> list[Any]:
    given = taken(value, "input", (str, list), "", LONGEST_TEXT)
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _message(item: Any, where: str) -> Message:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind is not None:
        taken(item, "id", str, where=f"{where}.")
    if kind == "function_call":
        own = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": own}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": text_of(_texts(item.get("output")), f"{where}.output")}
    if kind != "message":
        raise Refusal(400, "unsupported", f"{where} is not a message", "send text, calls and their results", where)
    return {"role": item.get("role"), "content": _texts(item.get("content"))}


def _item(item: Any, name: str) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        return {**item, "id": f"in_{name}"}
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"type": kind, "text": content or ""}]
    return {"type": "message", "status": "completed", **item, "id": f"msg_{name}", "content": parts}


def _texts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, dict) and part.get("type") in _TEXTS else part
        for part in content
    ]


def _tools(value: Mapping[str, Any]) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {name: each for name, each in tool.items() if name != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in taken(value, "tools", list, [])
    ]
    form = taken(value, "text", dict, {})
    check_names(form, ("format", "verbosity"), where="text.")
    taken(form, "verbosity", str, where="text.")
    return {"tools": tools, "tool_choice": value.get("tool_choice"), "response_format": form.get("format")}


@dataclass(slots=True)
class ResponsesResponse(Dialect):
    asked: Mapping[str, Any]
    options: QueryOptions
    model: str
    id: str
    keep: Callable[[Answer, dict[str, Any]], None]
    created: int = field(default_factory=lambda: int(time.time()))
    _said: str = ""
    _number: int = 0
    _is_open: bool = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        cut = answer.finish == "length"
        said = [self._item(answer.text, cut)] if answer.text or self._is_open or not answer.calls else []
        output = said + [_call(call) for call in answer.calls]
        own = self._object("incomplete" if cut else "completed", output)
        own["completed_at"] = None if cut else int(time.time())
        reason = {"reason": "max_output_tokens"} if cut else None
        own |= {"incomplete_details": reason, "usage": _usage(answer), "kvtool": about(answer)}
        self.keep(answer, own)
        return own

    def beginning(self, prompt: PromptTokens) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._object("in_progress", []))

    def piece(self, text: str) -> Iterator[str]:
        yield from self._open()
        self._said += text
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, answer: Answer) -> Iterator[str]:
        whole = self.whole(answer)  # with the text of a corrected answer, of which the draft was streamed
        if not answer.calls:
            yield from self._open()
        if self._is_open:
            yield self._event("response.output_text.done", **self._place, text=self._said, logprobs=[])
            yield self._event("response.content_part.done", **self._place, part=_part(self._said))
            yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        for index, call in enumerate(answer.calls, int(self._is_open)):
            item = _call(call)
            begun = item | {"arguments": "", "status": "in_progress"}
            at = {"output_index": index, "item_id": item["id"]}
            yield self._event("response.output_item.added", output_index=index, item=begun)
            yield self._event("response.function_call_arguments.delta", **at, delta=call.json)
            yield self._event("response.function_call_arguments.done", **at, name=call.name, arguments=call.json)
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, refusal: Refusal) -> Iterator[str]:
        said = refusal.to_json()
        error = {"code": "server_error", "message": said["message"]}
        yield self._event("response.failed", response=self._object("failed", []) | {"error": error})

    def _open(self) -> Iterator[str]:
        if not self._is_open:
            self._is_open = True
            item = self._item("", None) | {"content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._place, part=_part(""))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> str:
        value = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"

    def _item(self, text: str, cut: bool | None) -> dict[str, Any]:
        status = "in_progress" if cut is None else "incomplete" if cut else "completed"
        own = {"type": "message", "id": f"msg_{self.id}", "status": status, "role": "assistant"}
        return own | {"content": [_part(text)]}

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        echoed = {name: self.asked.get(name) for name in _ECHOED}
        echoed |= {name: getattr(self.options, name) for name in _SAMPLED}
        own = {"id": f"resp_{self.id}", "object": "response", "created_at": self.created, "status": status}
        text = self.asked.get("text") or {}
        form = text.get("format") or {"type": "text"}
        return {
            **own,
            **echoed,
            "model": self.model,
            "output": output,
            "error": None,
            "completed_at": None,
            "incomplete_details": None,
            "background": False,
            "service_tier": "default",
            "top_logprobs": 0,
            "metadata": self.asked.get("metadata") or {},
            "parallel_tool_calls": self.asked.get("parallel_tool_calls") is not False,
            "store": self.asked.get("store") is not False,
            "text": text | {"format": _FORMAT | form if form["type"] == "json_schema" else form},
            "tool_choice": self.asked.get("tool_choice") or "auto",
            "tools": [_TOOL | tool for tool in self.asked.get("tools") or []],
            "truncation": "disabled",
            "usage": None,
        }


def _call(call: Call) -> dict[str, Any]:
    own = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
    return own | {"arguments": call.json, "status": "completed" if call.partial is None else "incomplete"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(answer: Answer) -> dict[str, Any]:
    tokens = answer.facts["tokens"]
    return {
        "input_tokens": tokens["prompt"],
        "input_tokens_details": {"cached_tokens": cached_tokens(answer), "cache_write_tokens": 0},
        "output_tokens": tokens["generated"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens["prompt"] + tokens["generated"],
    }


class Responses:
    def __init__(self, answers: Answers) -> None:
        self._answers, self._remembered = answers, Remembered()

    async def create(self, request: Request) -> Response:
        owner, name = self._answers.owner(request), secrets.token_hex(16)
        value = await body_of(request)
        messages: list[Message] = []

        def keep(answer: Answer, response: dict[str, Any]) -> None:
            if value.get("store") is not False:
                said: Message = {"role": "assistant", "content": answer.text}
                if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):  # it was continued
                    said["content"] = text_of(messages.pop()["content"] or "", "input").rstrip() + answer.text
                if calls := [{"name": call.name, "arguments": call.arguments} for call in answer.calls]:
                    said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
                items = [_item(item, f"{number}_{name}") for number, item in enumerate(_items(value))]
                self._remembered.keep(owner, f"resp_{name}", Exchange([*messages, said], items, response))

        return await self._answers.answered(
            request,
            partial(self._read, owner, messages),
            lambda asked, model: ResponsesResponse(value, asked.ask.options, model, name, keep),
            value,
        )

    def _read(
        self, owner: str, messages: list[Message], value: Mapping[str, Any], options: QueryOptions, strict: bool
    ) -> ChatRequest:
        check_parameters(value, _KNOWN)
        for name, kind in _TYPES.items():
            taken(value, name, kind)
        for name in value.get("metadata") or ():
            taken(value["metadata"], name, str, where="metadata.")
        if unknown := [name for name in texts(value, "include") if name not in _FOREIGN]:
            raise Refusal(400, "unsupported", f"include cannot have {unknown[0]!r}", "leave it out", "include")
        before = taken(value, "previous_response_id", str)
        messages += self._remembered.exchange(owner, before, "previous_response_id").messages if before else []
        given = _input_messages(value)
        names = ["previous_response_id"] * len(messages) + [*given]
        messages += given.values()
        chat = {each: value.get(each) for each in _SAME}
        system = taken(value, "instructions", str, "", LONGEST_TEXT)  # of this response only
        with renamed(messages="input", response_format="text.format", function="", tool_calls=""):
            return read_chat(chat | {"messages": messages} | _tools(value), options, strict, system, names)

    async def count(self, request: Request) -> Response:
        value, owner = await body_of(request), self._answers.owner(request)
        tokens = await self._answers.count(value, partial(self._read, owner, []))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    def _exchange(self, request: Request) -> Exchange:
        return self._remembered.exchange(self._answers.owner(request), request.path_params["name"])

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise Refusal(400, "unsupported", "a finished response cannot be streamed", "leave it out", "stream")
        return JSONResponse(self._exchange(request).response)

    async def items(self, request: Request) -> Response:
        asked = request.query_params
        order, given, after = asked.get("order", "desc"), asked.get("limit", "20"), asked.get("after")
        items = self._exchange(request).input[:: 1 if order == "asc" else -1]
        ids = [None, *(item["id"] for item in items)]  # the first page is after none
        limit = int(given) if given.isdecimal() and len(given) < 4 else 0
        valid = {"order": order in ("asc", "desc"), "limit": limit > 0, "after": after in ids}
        for name in (name for name in valid if not valid[name]):
            hint = "order: asc or desc; limit: 1 to 999; after: the id of an item"
            raise Refusal(400, "wrong_value", f"{name} cannot be {asked[name]!r}", hint, name)
        first = ids.index(after)
        page = items[first : first + limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": page, "has_more": first + limit < len(items), **ends})

    async def cancel(self, request: Request) -> Response:
        self._exchange(request)
        hint = "close the connection to end an answer"
        raise Refusal(400, "not_background", "only a response in the background can be cancelled", hint)

    async def forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._remembered.forget(self._answers.owner(request), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})
