"""The messages API of Anthropic."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtool.core.errors import KvtoolError
from kvtool.serve import requests
from kvtool.serve.answers import Answers, Dialect, about, server_event
from kvtool.serve.chat import Chat, Message, Question, call_message, result_message
from kvtool.serve.job import Answer, Ask, Call, TokenCounts
from kvtool.serve.wire import ANTHROPIC_PATH, Refusal, body_of, error_body

# ---- requests ----

_NEEDED = {"text": "text", "tool_use": "name", "tool_result": "type", "thinking": "type", "redacted_thinking": "type"}
"""Field of a block that has to be there, by its type."""


class _Block(requests.Part):
    """A part of a message; thinking, which only the model reads that has written it, is left out."""

    type: str
    text: requests.Text = ""
    name: requests.Name = ""
    input: dict[str, Any] = {}
    content: requests.Content = ""
    is_error: bool = False

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.type not in _NEEDED:
            raise requests.no_text(self.type)
        if _NEEDED[self.type] not in self.model_fields_set:
            raise requests.invalid("missing", f"{{name}} has no {_NEEDED[self.type]}")
        return self


def _blocks_of(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(requests.Part):
    role: Literal["user", "assistant"]
    content: Annotated[list[_Block], BeforeValidator(_blocks_of)] = []

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.role == "user" and "content" not in self.model_fields_set:
            raise requests.invalid("missing", "{name} has no content")
        foreign = "tool_use" if self.role == "user" else "tool_result"
        if any(block.type == foreign for block in self.content):
            raise requests.invalid("unsupported", f"{{name}}: a message of the {self.role} has no {foreign}")
        return self

    def messages(self, path: str) -> list[Message]:
        """Return the message, with results of tools as messages before it."""
        text = "\n".join(block.text for block in self.content if block.type == "text")
        results = [block for block in self.content if block.type == "tool_result"]
        if uses := [block for block in self.content if block.type == "tool_use"]:
            calls = [requests.SentCall(name=block.name, arguments=block.input) for block in uses]
            return [call_message(text, calls, path)]
        messages = [result_message("Error:\n" * block.is_error + block.content, path) for block in results]
        has_text = any(block.type == "text" for block in self.content)
        return [*messages, Message(self.role, text, path=path)] if has_text or not messages else messages


class _Tool(requests.Function):
    parameters: requests.Parameters = Field({}, alias="input_schema")
    type: Literal["custom"] = "custom"
    cache_control: Any = None


class _Choice(requests.StrictPart):
    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: requests.Name = ""
    disable_parallel_tool_use: bool = False

    def choice(self) -> requests.ToolChoice:
        kinds: dict[str, Any] = {"any": "required", "tool": "function"}
        return requests.ToolChoice(type=kinds.get(self.type, self.type), name=self.name)


class _Output(requests.Part):
    """`effort` is of a model that thinks."""

    format: requests.Format | None = None


class _Metadata(requests.Part):
    user_id: requests.Name = ""


class MessagesBody(Question):
    max_tokens: Annotated[int, Field(ge=1)]
    messages: Annotated[list[_Message], requests.Messages] = []
    system: requests.Content = ""
    stop_sequences: requests.Stops = []
    tools: Annotated[list[_Tool], requests.ToolList, requests.ShortJson] = []
    tool_choice: _Choice = _Choice()
    output_config: _Output = _Output()
    metadata: _Metadata = _Metadata()

    def chat(self, **more: Any) -> Chat:
        return super().chat(
            messages=[each for number, one in enumerate(self.messages) for each in one.messages(f"messages.{number}")],
            system=self.system,
            functions=self.tools,
            choice=self.tool_choice.choice(),
            format=self.output_config.format,
            format_name="output_config.format",
            parallel=not self.tool_choice.disable_parallel_tool_use,
            stop=self.stop_sequences,
            user=self.metadata.user_id,
        )


# ---- responses ----


@dataclass(slots=True)
class MessageResponse(Dialect):
    chat: Chat
    ask: Ask
    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _is_open: bool = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        content = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
        content += [_tool_use(call) for call in answer.calls]
        return self._message(content) | _end(answer) | {"usage": _usage(answer.tokens), "kvtool": about(answer)}

    def beginning(self, prompt: TokenCounts) -> Iterator[str]:
        yield _event("message_start", message=self._message([]) | {"usage": _usage(prompt)})

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
        yield _event("message_delta", delta=_end(answer), usage=_usage(answer.tokens), kvtool=about(answer))
        yield _event("message_stop")

    def failed(self, error: KvtoolError) -> Iterator[str]:
        yield _event(**error_body(Refusal.of(error), ANTHROPIC_PATH))

    def _open(self) -> Iterator[str]:
        if not self._is_open:
            self._is_open = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        own = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return own | {"stop_reason": None, "stop_sequence": None}


def _event(type: str, **values: Any) -> str:
    return server_event({"type": type, **values}, type)


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _end(answer: Answer) -> dict[str, str | None]:
    if answer.calls and answer.finish == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": "max_tokens" if answer.finish == "length" else "end_turn", "stop_sequence": None}


def _usage(tokens: TokenCounts) -> dict[str, int]:
    counts = {"input_tokens": tokens.prompt - tokens.cached, "output_tokens": tokens.generated}
    return counts | {"cache_read_input_tokens": tokens.cached, "cache_creation_input_tokens": 0}


def anthropic_routes(answers: Answers) -> list[Route]:
    async def count(request: Request) -> Response:
        value = await body_of(request)
        value["max_tokens"] = value.get("max_tokens") or 1
        return JSONResponse({"input_tokens": await answers.count(value, MessagesBody.read_chat)})

    return [
        answers.route(ANTHROPIC_PATH, MessagesBody.read_chat, MessageResponse),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
