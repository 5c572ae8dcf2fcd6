"""The responses API of OpenAI: one input, one response, and conversations that the server remembers."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import Answers, ChatRequest, Trim, about, cached_tokens
from kvtool.serve.job import Answer, Call
from kvtool.serve.openai import read_chat
from kvtool.serve.wire import LONGEST_TEXT, Refusal, check_names, taken

# Parameters as in OpenAI's chat.
_SAME = (*("model", "stream", "temperature", "top_p", "kvtool", "user", "safety_identifier", "parallel_tool_calls"),)
_TOOLS = ("tools", "tool_choice", "text")
_KNOWN = ("input", "instructions", "max_output_tokens", "previous_response_id", "store", *_TOOLS, *_SAME)
# Parameters about the client, its account and the server only.
_IGNORED = (
    *("metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "reasoning", "max_tool_calls", "stream_options"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled", "auto"),
    "include": ([],),
    "background": (False,),
    "top_logprobs": (0,),
}
_TEXTS = ("input_text", "output_text", "text")  # types of a part of a message
_MOST_BYTES = 64 << 20  # of remembered conversations, all together

Message = dict[str, Any]
"""A message as in OpenAI's chat."""


class Remembered:
    """Conversations by the name of their last response, the latest ones up to some bytes; each owner has its own."""

    def __init__(self, limit: int = _MOST_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._held: OrderedDict[tuple[str, str], str] = OrderedDict()

    def keep(self, owner: str, name: str, messages: list[Message]) -> None:
        """Remember the messages up to a response, and its own."""
        self._held[owner, name] = text = json.dumps(messages)
        self._bytes += len(text)
        while self._bytes > self._limit:
            self._bytes -= len(self._held.popitem(last=False)[1])

    def messages(self, owner: str, name: str) -> list[Message]:
        """Return the messages up to a response. Raises Refusal for one that is not remembered."""
        if (text := self._held.get((owner, name))) is None:
            raise _unknown(name)
        self._held.move_to_end((owner, name))
        return list(json.loads(text))

    def forget(self, owner: str, name: str) -> None:
        """Forget a response. Raises Refusal if it is not remembered."""
        if (text := self._held.pop((owner, name), None)) is None:
            raise _unknown(name)
        self._bytes -= len(text)


def _unknown(name: str) -> Refusal:
    hint = "send all messages as `input`; the server remembers responses until it ends, and not those with store: false"
    return Refusal(404, "previous_response_not_found", f"there is no response {name!r}", hint, "previous_response_id")


def input_messages(value: Mapping[str, Any]) -> list[Message]:
    """Return the messages of `input`. Raises Refusal for parts that are no text."""
    given = taken(value, "input", (str, list), "", LONGEST_TEXT)
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_message(item, f"input.{number}") for number, item in enumerate(given)]


def _message(item: Any, where: str) -> Message:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "function_call":
        own = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": own}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": _texts(item.get("output"))}
    if kind != "message":
        raise Refusal(
            400, "unsupported", f"{where} is no message", "messages with text, calls and their results", where
        )
    return {"role": item.get("role"), "content": _texts(item.get("content"))}


def _texts(content: Any) -> Any:
    """Return content with its parts as OpenAI's chat has them; what is no text is refused there by name."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, dict) and part.get("type") in _TEXTS else part
        for part in content
    ]


def _tools(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return tools, choice and format as OpenAI's chat has them; what they cannot say is refused there by name."""
    tools = [
        {"type": "function", "function": {name: each for name, each in tool.items() if name != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in taken(value, "tools", list, [])
    ]
    choice, form = value.get("tool_choice"), taken(value, "text", dict, {})
    check_names(form, ("format", "verbosity"))
    form = form.get("format")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return {"tools": tools, "tool_choice": choice, "response_format": form}


@dataclass(slots=True)
class ResponsesResponse:
    """Response of `/v1/responses`: an object, or server-sent events.

    Attributes
    ----------
    asked : the body of the request. `keep`: called with the answer, if the response is to be remembered.
    """

    media_type: ClassVar[str] = "text/event-stream"
    asked: Mapping[str, Any]
    model: str
    id: str
    keep: Callable[[Answer], None]
    created: float = field(default_factory=time.time)
    _trim: Trim = field(default_factory=Trim)
    _said: str = ""
    _number: int = 0
    _is_open: bool = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the object of a complete answer."""
        self.keep(answer)
        cut = answer.finish == "length"
        said = [self._item(answer.text, cut)] if answer.text or self._is_open or not answer.calls else []
        output = said + [_call(call, call.json, "completed") for call in answer.calls]
        own = self._object("incomplete" if cut else "completed", output)
        reason = {"reason": "max_output_tokens"} if cut else None
        return own | {"incomplete_details": reason, "usage": _usage(answer), "kvtool": about(answer)}

    def beginning(self) -> Iterator[str]:
        """Yield the events before the first piece."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._object("in_progress", []))

    def piece(self, text: str) -> Iterator[str]:
        """Yield the event of a piece of text."""
        if shown := self._trim.piece(text):
            yield from self._open()
            self._said += shown
            yield self._event("response.output_text.delta", **self._place, delta=shown, logprobs=[])

    def waiting(self) -> str:
        """Return an event that changes nothing."""
        return ": waiting\n\n"  # a comment

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the events after the last piece. Of a corrected answer the last event has the text."""
        whole = self.whole(answer)
        if not answer.calls:
            yield from self._open()
        if self._is_open:
            yield self._event("response.output_text.done", **self._place, text=self._said, logprobs=[])
            yield self._event("response.content_part.done", **self._place, part=_part(self._said))
            yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        for index, call in enumerate(answer.calls, int(self._is_open)):
            begun, done, at = (
                _call(call, "", "in_progress"),
                _call(call, call.json, "completed"),
                {"output_index": index},
            )
            yield self._event("response.output_item.added", **at, item=begun)
            at["item_id"] = done["id"]
            yield self._event("response.function_call_arguments.delta", **at, delta=call.json)
            yield self._event("response.function_call_arguments.done", **at, name=call.name, arguments=call.json)
            yield self._event("response.output_item.done", output_index=index, item=done)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the event of an error within a stream."""
        said = refusal.to_json()
        error = {"code": "server_error", "message": said["message"]}
        yield self._event("response.failed", response=self._object("failed", []) | {"error": error})

    def _open(self) -> Iterator[str]:
        """Yield the beginning of the message, once."""
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
        echoed = {
            name: self.asked.get(name)
            for name in (
                *("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user"),
            )
        }
        own = {"id": f"resp_{self.id}", "object": "response", "created_at": self.created, "status": status}
        return {
            **own,
            **echoed,
            "model": self.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "metadata": self.asked.get("metadata") or {},
            "parallel_tool_calls": self.asked.get("parallel_tool_calls") is not False,
            "store": self.asked.get("store") is not False,
            "text": {"format": {"type": "text"}} | (self.asked.get("text") or {}),
            "tool_choice": self.asked.get("tool_choice") or "auto",
            "tools": self.asked.get("tools") or [],
            "truncation": "disabled",
            "usage": None,
        }


def _call(call: Call, arguments: str, status: str) -> dict[str, Any]:
    own = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
    return own | {"arguments": arguments, "status": status}


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
    """Endpoints of the responses API."""

    def __init__(self, answers: Answers) -> None:
        self._answers, self._remembered = answers, Remembered()

    async def create(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        owner, name = self._answers.owner(request), secrets.token_hex(16)
        asked: dict[str, Any] = {}
        messages: list[Message] = []

        def read(value: Mapping[str, Any], options: QueryOptions, strict: bool) -> ChatRequest:
            check_names(value, (*_KNOWN, *_IGNORED), _NEUTRAL)
            asked.update(value)
            taken(value, "store", bool)
            before = taken(value, "previous_response_id", str)
            messages.extend(self._remembered.messages(owner, before) if before else [])
            messages.extend(input_messages(value))
            chat = {each: value.get(each) for each in _SAME} | {"max_tokens": value.get("max_output_tokens")}
            system = taken(value, "instructions", str, "", LONGEST_TEXT)  # of this response only
            said = [{"role": "system", "content": system}] if system else []
            return read_chat(chat | {"messages": [*said, *messages]} | _tools(value), options, strict)

        def keep(answer: Answer) -> None:
            if asked.get("store") is not False:
                said: Message = {"role": "assistant", "content": answer.text}
                if answer.calls:
                    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
                    said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
                self._remembered.keep(owner, f"resp_{name}", [*messages, said])

        return await self._answers.answered(request, read, lambda _, model: ResponsesResponse(asked, model, name, keep))

    async def forget(self, request: Request) -> Response:
        """`DELETE /v1/responses/ID`."""
        name = request.path_params["name"]
        self._remembered.forget(self._answers.owner(request), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})
