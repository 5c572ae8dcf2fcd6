"""The messages API of Anthropic."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import Answers, ChatRequest, Trim, about, cached_tokens
from kvtool.serve.job import Answer
from kvtool.serve.openai import read_chat
from kvtool.serve.wire import Refusal, check_names, error_body, taken, texts

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "kvtool")  # as in OpenAI's chat
_KNOWN = ("messages", "system", "stop_sequences", "metadata", *_SAME)
# Parameters about the client, its account and the machine only.
_IGNORED = ("service_tier", "speed", "inference_geo", "cache_control", "user_profile_id", "workspace_id")
_NEUTRAL = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
    "top_k": (-1, 0),
}
_PATH = "/v1/messages"


def read_message(value: Mapping[str, Any], options: QueryOptions, strict: bool) -> ChatRequest:
    """Parse a body of `/v1/messages`; see `openai.read_chat`. Raises Refusal."""
    check_names(value, (*_KNOWN, *_IGNORED), _NEUTRAL)
    if value.get("max_tokens") is None:
        raise Refusal(400, "missing", "max_tokens is missing", "the most tokens of an answer", "max_tokens")
    messages = taken(value, "messages", list, [])
    for number, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") not in ("user", "assistant"):
            what = f"messages.{number} has another role than user or assistant"
            raise Refusal(400, "unsupported", what, "instructions go into `system`", f"messages.{number}.role")
    if system := value.get("system"):
        messages = [{"role": "system", "content": system}, *messages]
    stops = list(texts(value, "stop_sequences"))
    user = taken(taken(value, "metadata", dict, {}), "user_id", str)
    same = {name: value.get(name) for name in _SAME}
    return read_chat({**same, "messages": messages, "stop": stops, "user": user}, options, strict)


@dataclass(slots=True)
class MessageResponse:
    """Response of `/v1/messages`: an object, or server-sent events."""

    media_type: ClassVar[str] = "text/event-stream"
    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _trim: Trim = field(default_factory=Trim)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the object of a complete answer."""
        content = [{"type": "text", "text": answer.text}]
        return self._message(content) | _end(answer) | {"usage": _usage(answer), "kvtool": about(answer)}

    def beginning(self) -> Iterator[str]:
        """Yield the events before the first piece. The prompt's length is in the last event but one."""
        begun = self._message([]) | {"usage": {"input_tokens": 0, "output_tokens": 0}}
        yield _event("message_start", message=begun)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def piece(self, text: str) -> Iterator[str]:
        """Yield the events of a piece of text."""
        if shown := self._trim.piece(text):
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": shown})

    def waiting(self) -> str:
        """Return an event that changes nothing."""
        return _event("ping")

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the events after the last piece."""
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=_end(answer), usage=_usage(answer), kvtool=about(answer))
        yield _event("message_stop")

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the event of an error within a stream."""
        yield _event(**error_body(refusal, _PATH))

    def _message(self, content: list[dict[str, str]]) -> dict[str, Any]:
        own = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return own | {"stop_reason": None, "stop_sequence": None}


def _event(type: str, **values: Any) -> str:
    return f"event: {type}\ndata: {json.dumps({'type': type, **values}, ensure_ascii=False)}\n\n"


def _end(answer: Answer) -> dict[str, str | None]:
    if answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": "max_tokens" if answer.finish == "length" else "end_turn", "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    """Count the tokens; those of the input leave out the cached ones, as this API has it."""
    tokens, cached = answer.facts["tokens"], cached_tokens(answer)
    counts = {"input_tokens": tokens["prompt"] - cached, "output_tokens": tokens["generated"]}
    return counts | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


class Anthropic:
    """Endpoint of the messages API."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def message(self, request: Request) -> Response:
        """`POST /v1/messages`."""
        return await self._answers.answered(request, read_message, lambda _, model: MessageResponse(model))
