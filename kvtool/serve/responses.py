"""The responses API of OpenAI: one input, one response, and conversations that the server remembers."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtool.core.errors import KvtoolError
from kvtool.serve import requests
from kvtool.serve.answers import Answers, Dialect, about, server_event
from kvtool.serve.chat import Chat, Message, OpenAIQuestion, call_message, result_message
from kvtool.serve.job import Answer, Ask, Call, TokenCounts
from kvtool.serve.wire import Refusal, body_of

_ECHOED = (
    *("instructions", "max_output_tokens", "previous_response_id", "user", "safety_identifier", "prompt_cache_key"),
    *("reasoning", "max_tool_calls"),
)
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_TOOL = {"description": None, "parameters": None, "strict": None}
_FORMAT = {"name": "answer", "description": None, "schema": None, "strict": False}
_MOST_BYTES = 64 << 20  # of remembered conversations, all together

# ---- requests ----


def _items_of(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


_NEEDED = {"message": "role", "function_call": "name", "function_call_output": "output", "reasoning": "type"}
"""Field of an item that has to be there, by its type."""


class _Item(requests.Part):
    """A message, a call or the result of one. `reasoning` is left out: only the model reads it that has written it."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: requests.Name = ""
    role: Literal["system", "developer", "user", "assistant", "tool"] = "user"
    content: requests.Content | None = None
    name: requests.Name = ""
    arguments: requests.Arguments = {}
    output: requests.Content = ""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        has_content = self.type != "message" or self.role == "assistant" or self.content is not None
        needed = _NEEDED[self.type] if has_content else "content"
        if needed not in self.model_fields_set:
            raise requests.invalid("missing", f"{{name}} has no {needed}")
        return self

    def message(self, path: str) -> Message:
        if self.type == "function_call":
            return call_message("", [requests.SentCall(name=self.name, arguments=self.arguments)], path)
        if self.type == "function_call_output" or self.role == "tool":
            return result_message(self.output or self.content or "", path)
        return Message("system" if self.role == "developer" else self.role, self.content or "", path=path)


class _Tool(requests.Function):
    type: Literal["function"]


class _TextOptions(requests.StrictPart):
    format: requests.Format | None = None
    verbosity: requests.Name = ""  # of other models


class ResponsesBody(OpenAIQuestion):
    input: Annotated[list[_Item], BeforeValidator(_items_of), Field(min_length=1), requests.Messages]
    instructions: requests.Text = ""  # of this response only
    previous_response_id: requests.Name = ""
    include: list[Literal["reasoning.encrypted_content"]] = []  # of other models
    tools: Annotated[list[_Tool], requests.ToolList, requests.ShortJson] = []
    tool_choice: requests.ToolChoice = requests.ToolChoice(type="auto")
    text: _TextOptions = _TextOptions()
    store: bool = True
    metadata: dict[str, requests.Name] = {}
    reasoning: dict[str, Any] = {}
    max_tool_calls: int = 0
    prompt_cache_key: requests.Name = ""

    def chat(self, **more: Any) -> Chat:
        fields: dict[str, Any] = {"system": self.instructions, "functions": self.tools, "choice": self.tool_choice}
        return super().chat(**fields, format=self.text.format, format_name="text.format", **more)


# ---- remembered responses ----


class ItemsQuery(requests.Part):
    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, BeforeValidator(requests.number_of), Field(ge=1, le=999)] = 20
    after: requests.Name = ""


class Exchange(NamedTuple):
    """A response that is remembered: the messages up to it and its own, the items of its input, and its object."""

    messages: Sequence[Message]
    items: Sequence[dict[str, Any]]
    response: Mapping[str, Any]


class Remembered:
    """Responses by name, the latest ones up to some bytes; each owner has its own."""

    def __init__(self, limit: int = _MOST_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._held: OrderedDict[tuple[str, str], str] = OrderedDict()

    def keep(self, owner: str, name: str, exchange: Exchange) -> None:
        self._held[owner, name] = text = json.dumps(exchange)
        self._bytes += len(text)
        while self._bytes > self._limit:
            self._bytes -= len(self._held.popitem(last=False)[1])

    def find(self, owner: str, name: str, param: str | None = None) -> Exchange:
        if (text := self._held.get((owner, name))) is None:
            hint = "send all messages as `input`; the server remembers responses until it ends, unless store is false"
            raise Refusal(404, "previous_response_not_found", f"there is no response {name!r}", hint, param)
        self._held.move_to_end((owner, name))
        messages, items, response = json.loads(text)
        return Exchange([Message(*each) for each in messages], items, response)

    def forget(self, owner: str, name: str) -> None:
        self.find(owner, name)
        self._bytes -= len(self._held.pop((owner, name)))


def _item(item: Any, name: str) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        return {**item, "id": f"in_{name}"}
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"type": kind, "text": content or ""}]
    return {"type": "message", "status": "completed", **item, "id": f"msg_{name}", "content": parts}


# ---- responses ----


@dataclass(slots=True)
class ResponsesResponse(Dialect):
    chat: Chat
    ask: Ask
    model: str
    asked: Mapping[str, Any]
    keep: Callable[[str, Exchange], None]
    id: str = field(default_factory=lambda: secrets.token_hex(16))
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
        if self.asked.get("store") is not False:
            given = enumerate(_items_of(self.asked["input"]))
            items = [_item(item, f"{number}_{self.id}") for number, item in given]
            self.keep(own["id"], Exchange(_continued(self.chat.messages, answer), items, own))
        return own

    def beginning(self, prompt: TokenCounts) -> Iterator[str]:
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

    def failed(self, error: KvtoolError) -> Iterator[str]:
        reason = {"code": "server_error", "message": Refusal.of(error).to_json()["message"]}
        yield self._event("response.failed", response=self._object("failed", []) | {"error": reason})

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
        return server_event(value, kind)

    def _item(self, text: str, cut: bool | None) -> dict[str, Any]:
        status = "in_progress" if cut is None else "incomplete" if cut else "completed"
        own = {"type": "message", "id": f"msg_{self.id}", "status": status, "role": "assistant"}
        return own | {"content": [_part(text)]}

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        echoed = {name: self.asked.get(name) for name in _ECHOED}
        echoed |= {name: getattr(self.ask.options, name) for name in _SAMPLED}
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
    tokens = answer.tokens
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
        "output_tokens": tokens.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens.prompt + tokens.generated,
    }


def _continued(messages: Sequence[Message], answer: Answer) -> list[Message]:
    """Return a conversation with its answer, which may continue the last message."""
    *before, last = messages
    if last.role != "assistant" or last.kind:
        before, begun = [*messages], ""
    else:
        begun = last.text.rstrip()
    text = begun + answer.text
    said = call_message(text, answer.calls) if answer.calls else Message("assistant", text)
    return [*before, said]


class Responses:
    def __init__(self, answers: Answers) -> None:
        self._answers, self._remembered = answers, Remembered()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count, methods=["POST"]),
            Route("/v1/responses/{name}", self.show, methods=["GET"]),
            Route("/v1/responses/{name}", self.forget, methods=["DELETE"]),
            Route("/v1/responses/{name}/input_items", self.items),
        ]

    async def create(self, request: Request) -> Response:
        owner, value = self._answers.owner(request), await body_of(request)
        begin = partial(ResponsesResponse, asked=value, keep=partial(self._remembered.keep, owner))
        return await self._answers.answered(request, partial(self._read, owner), begin, value)

    def _read(self, owner: str, value: Mapping[str, Any]) -> Chat:
        """Read a request; its messages follow those of an earlier response."""
        body, messages = ResponsesBody.read(value), list[Message]()
        if before := body.previous_response_id:
            messages += self._remembered.find(owner, before, "previous_response_id").messages
        given = enumerate(body.input)
        messages += [each.message(f"input.{number}") for number, each in given if each.type != "reasoning"]
        if (count := len(messages)) > requests.MOST_MESSAGES:
            most = f"at most {requests.MOST_MESSAGES:,}"
            raise Refusal(400, "too_many", f"the conversation has {count:,} messages", most, "previous_response_id")
        return body.chat(messages=messages)

    async def count(self, request: Request) -> Response:
        value, owner = await body_of(request), self._answers.owner(request)
        tokens = await self._answers.count(value, partial(self._read, owner))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise Refusal(400, "unsupported", "a finished response cannot be streamed", "leave it out", "stream")
        return JSONResponse(self._find(request).response)

    def _find(self, request: Request) -> Exchange:
        return self._remembered.find(self._answers.owner(request), request.path_params["name"])

    async def items(self, request: Request) -> Response:
        asked = ItemsQuery.read(request.query_params)
        items = self._find(request).items[:: 1 if asked.order == "asc" else -1]
        ids = ["", *(item["id"] for item in items)]  # the first page is after none
        if asked.after not in ids:
            raise Refusal(400, "wrong_value", f"after cannot be {asked.after!r}", "the id of an item", "after")
        first = ids.index(asked.after)
        page = items[first : first + asked.limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        more = first + asked.limit < len(items)
        return JSONResponse({"object": "list", "data": page, "has_more": more, **ends})

    async def forget(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._remembered.forget(self._answers.owner(request), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})
