"""The OpenAI API: chat and text completions, models and embeddings."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtool.core.errors import KvtoolError
from kvtool.serve import requests
from kvtool.serve.answers import Answers, Dialect, about, server_event, unknown_model
from kvtool.serve.chat import Chat, Message, OpenAIQuestion, call_message, result_message
from kvtool.serve.job import Answer, Ask, Call, TokenCounts
from kvtool.serve.wire import VERSION, Refusal, body_of, briefly

# ---- requests ----

_Token = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class ChatMessage(requests.Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: requests.Content | None = None
    tool_calls: list[requests.SentToolCall] = []

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise requests.invalid("unsupported", "{name}: only the assistant calls tools")
        if self.content is None and self.role != "assistant":
            raise requests.invalid("missing", "{name} has no content")
        return self

    def message(self, path: str) -> Message:
        text = self.content or ""
        if self.role == "tool":
            return result_message(text, path)
        if self.tool_calls:
            return call_message(text, [each.function for each in self.tool_calls], path)
        return Message("system" if self.role == "developer" else self.role, text, path=path)


class _StreamOptions(requests.Part):
    include_usage: bool = False


class LogProbs(requests.Body):
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    def counted(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "unsupported", "top_logprobs needs logprobs: true", param="top_logprobs")
        return {"top_logprobs": self.top_logprobs} if self.logprobs else {}


class _Completion(OpenAIQuestion):
    stop: requests.Stops = []
    logit_bias: Annotated[dict[_Token, _Bias], Field(max_length=1024)] = {}
    stream_options: _StreamOptions = _StreamOptions()

    def chat(self, **more: Any) -> Chat:
        biases = tuple(f"{token}={bias:f}" for token, bias in self.logit_bias.items())
        options = self.sampling() | {"logit_bias": biases} | more.pop("options", {})
        usage = self.stream_options.include_usage
        return super().chat(options=options, stop=self.stop, usage=usage, **more)


class CompletionBody(_Completion):
    prompt: Annotated[list[requests.Text], BeforeValidator(requests.as_list), Field(min_length=1, max_length=1)]

    def chat(self, **more: Any) -> Chat:
        return super().chat(prompt=self.prompt[0])


class ChatBody(_Completion, LogProbs):
    messages: Annotated[list[ChatMessage], requests.Messages] = []
    tools: Annotated[list[requests.FunctionTool], requests.ToolList, requests.ShortJson] = []
    tool_choice: requests.ToolChoice = requests.ToolChoice(type="auto")
    response_format: requests.Format | None = None

    def chat(self, **more: Any) -> Chat:
        return super().chat(
            messages=[each.message(f"messages.{number}") for number, each in enumerate(self.messages)],
            functions=[each.function for each in self.tools],
            choice=self.tool_choice,
            format=self.response_format,
            options=self.counted(),
        )


# ---- responses ----

_DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class OpenAIResponse(Dialect):
    chat: Chat
    ask: Ask
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def _is_chat(self) -> bool:
        return self.chat.prompt is None

    def whole(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": [_call(call) for call in answer.calls]}
        said = {"message": message} if self._is_chat else {"text": answer.text}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._object(kind, said, answer) | {"usage": _usage(answer), "kvtool": about(answer)}

    def beginning(self, prompt: TokenCounts) -> Iterator[str]:
        if self._is_chat:
            yield server_event(self._chunk({"role": "assistant", "content": None if self.ask.tools else ""}))

    def piece(self, text: str) -> Iterator[str]:
        yield server_event(self._chunk({"content": text} if self._is_chat else text))

    def end(self, answer: Answer) -> Iterator[str]:
        for number, call in enumerate(answer.calls):
            yield server_event(self._chunk({"tool_calls": [{"index": number, **_call(call)}]}))
        last = self._chunk({} if self._is_chat else "", answer)
        yield server_event({**last, "kvtool": about(answer)})
        if self.chat.usage:
            yield server_event({**last, "choices": [], "usage": _usage(answer)})
        yield _DONE

    def failed(self, error: KvtoolError) -> Iterator[str]:
        yield server_event({"error": Refusal.of(error).to_json()})
        yield _DONE

    def _chunk(self, said: dict[str, Any] | str, answer: Answer | None = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._object(kind, {"delta": said} if self._is_chat else {"text": said}, answer)

    def _object(self, kind: str, said: dict[str, Any], answer: Answer | None) -> dict[str, Any]:
        name = f"chatcmpl-{self.id}" if self._is_chat else f"cmpl-{self.id}"
        end: dict[str, Any] = {"finish_reason": None, "logprobs": None}
        if answer is not None:
            end = {
                "finish_reason": "tool_calls" if answer.calls and answer.finish == "stop" else answer.finish,
                "logprobs": None if answer.logprobs is None else {"content": answer.logprobs, "refusal": None},
            }
        choice = {"index": 0, **said, **end}
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": [choice]}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}


def _usage(answer: Answer) -> dict[str, Any]:
    tokens = answer.tokens
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.generated,
        "total_tokens": tokens.prompt + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
    }


# ---- endpoints ----

_EMBEDDED_AT_ONCE = 2  # requests with a thread of their own: the loop has few
_MADE = "1970-01-01T00:00:00Z"  # Anthropic's API has it so where the date is not known
_Text = Annotated[requests.Text, Field(min_length=1)]
Texts = Annotated[list[_Text], BeforeValidator(requests.as_list), Field(min_length=1, max_length=2048)]


class EmbeddingsBody(requests.Part):
    input: Texts
    model: requests.Name = ""
    encoding_format: Literal["float", "base64"] = "float"


class OpenAI:
    def __init__(self, answers: Answers) -> None:
        self._answers, self._engine = answers, answers.engine
        self._embedding = asyncio.Semaphore(_EMBEDDED_AT_ONCE)

    def routes(self) -> list[Route]:
        return [
            self._answers.route("/v1/chat/completions", ChatBody.read_chat, OpenAIResponse),
            self._answers.route("/v1/completions", CompletionBody.read_chat, OpenAIResponse),
            Route("/v1/models", self.models),
            Route("/v1/models/", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`, also in the form of Anthropic, whose clients send the version of its API."""
        names = [name for name in (self._engine.model_name, self._engine.embedder_name) if name]
        rows = [_model(name, request) for name in names]
        if VERSION in request.headers:
            ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
            return JSONResponse({"data": rows, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": rows})

    async def model(self, request: Request) -> Response:
        name, own = request.path_params["name"], self._engine.model_name
        if name != self._engine.embedder_name:
            if not own:
                raise unknown_model(name, own)
            self._answers.check_model(name, own)
        return JSONResponse(_model(name, request))

    async def vectors(self, words: Sequence[str], name: str) -> tuple[Any, int, str]:
        known = await briefly(lambda: self._engine.embedder_name)
        if known is None:
            raise Refusal(404, "no_embedder", "the store has no embedding model", "an ingest that names one makes it")
        if name not in ("", known):
            raise unknown_model(name, known)
        async with self._embedding:
            return *await asyncio.to_thread(self._engine.embed, words), known

    async def embed(self, request: Request) -> Response:
        body = EmbeddingsBody.read(await body_of(request))
        vectors, tokens, known = await self.vectors(body.input, body.model)
        rows = [
            {"object": "embedding", "index": number, "embedding": _encoded(body.encoding_format, vector)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": rows, "model": known, "usage": usage})


def _model(name: str, request: Request) -> dict[str, Any]:
    if VERSION in request.headers:
        return {"type": "model", "id": name, "display_name": name, "created_at": _MADE}
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "kvtool"}


def _encoded(kind: str, vector: Any) -> list[float] | str:
    """Return a vector as numbers, or as Base64 of its little-endian float32, which clients request by default."""
    if kind == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return [float(number) for number in vector]
