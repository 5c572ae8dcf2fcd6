"""The OpenAI API: chat and text completions, models and embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import reprlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.query.reply import Request as Question
from kvtool.serve.answers import Answers, ChatRequest, Dialect, about, cached_tokens, unknown_model
from kvtool.serve.job import Answer, Ask, Call, PromptTokens, Turns
from kvtool.serve.parameters import ENDLESS, SAMPLING, USER, check_parameters, checked, sampling_options
from kvtool.serve.tools import call_message, read_tools, text_of
from kvtool.serve.wire import LONGEST_TEXT, VERSION, Refusal, body_of, briefly, taken, texts, within

# ---- requests ----

# Options of a question that a client may set, under `kvtool`: none names a file or a model of this machine.
ALLOWED = (
    *("fusion", "ratio", "link_tokens", "link", "shift", "level", "max_loss", "top_k", "source", "retriever", "order"),
    *("min_score", "stop_repeats", "cite", "verify", "explain", "defer", "defer_first", "defer_threshold", "slo_ms"),
)
_OWN = ("documents", "chunks", "spot", "strict", *ALLOWED)
_KNOWN = ("kvtool", "model", "stream", "stream_options", "logit_bias", "stop", ENDLESS, *SAMPLING, *USER)
_OF_CHAT = ("messages", "tools", "tool_choice", "response_format", "parallel_tool_calls")
_TOKEN = re.compile("0|[1-9][0-9]{0,8}")
_MAX_BIASES, _MAX_BIAS = 1024, 100
_MAX_STOPS, _MAX_STOP = 16, 1000  # characters
_MAX_MESSAGES = 4096


def read_chat(
    value: Mapping[str, Any], options: QueryOptions, strict: bool = False, system: str = "", names: Sequence[str] = ()
) -> ChatRequest:
    """Parse a body of `/v1/chat/completions`. `system`: an instruction before those of the messages. `names`: of the
    messages, as the client has them."""
    given = taken(value, "messages", list, [])
    messages = _messages(given, names or [f"messages.{number}" for number in range(len(given))])
    end = len(messages)
    while end and messages[end - 1][0] in ("assistant", "system") and not given[end - 1].get("tool_calls"):
        end -= 1
    prefill = "\n\n".join(text.rstrip() for role, text in messages[end:] if role == "assistant" and text.rstrip())
    own = (("system", within(system, "system", LONGEST_TEXT)),) if system else ()
    messages = (*own, *messages[:end], *(each for each in messages[end:] if each[0] == "system"))
    system, turns, question = _conversation(messages)
    options = replace(options, system=system or options.system)
    return _read(value, Question(question, messages=messages, prefill=prefill), options, strict, turns)


def read_completion(value: Mapping[str, Any], options: QueryOptions, strict: bool = False) -> ChatRequest:
    prompts = texts(value, "prompt", LONGEST_TEXT)
    if len(prompts) != 1:
        raise Refusal(400, "no_prompt", "prompt has to be one text", "ask once for each", "prompt")
    return _read(value, Question(prompts[0], messages=(("user", prompts[0]),)), options, strict, None)


def _read(
    value: Mapping[str, Any], question: Question, options: QueryOptions, strict: bool, turns: Turns | None
) -> ChatRequest:
    is_chat = turns is not None
    own = taken(value, "kvtool", dict, {})
    if unknown := [name for name in own if name not in _OWN]:
        hint = did_you_mean(unknown[0], _OWN) or f"known: {', '.join(_OWN)}"
        raise Refusal(400, "unknown_option", f"kvtool has no option {unknown[0]!r}", hint, f"kvtool.{unknown[0]}")
    given = {name: checked(name, own[name], f"kvtool.{name}") for name in ALLOWED if own.get(name) is not None}
    if is_chat and value.get("logprobs") is True:
        given["top_logprobs"] = checked("top_logprobs", taken(value, "top_logprobs", int, 0), "top_logprobs")
        value = {**value, "logprobs": None, "top_logprobs": None}
    check_parameters(value, (*_KNOWN, *(_OF_CHAT if is_chat else ("prompt",))))
    given |= _sampling(value)
    tools, grammar = read_tools(value) if is_chat else ((), "")
    if grammar and question.prefill:
        raise Refusal(400, "unsupported", "a prefilled answer cannot follow a schema", param="messages")
    if grammar or question.prefill:
        if own.get("cite"):
            what = "cite does not apply to an answer that follows a schema or is prefilled"
            raise Refusal(400, "unsupported", what, "leave it out", "kvtool.cite")
        given["cite"] = False
    stops = texts(value, "stop", _MAX_STOP, _MAX_STOPS)
    if grammar:  # a text that is cut off follows none
        given |= {"grammar": grammar, "stop_repeats": False, "min_tokens": 0}
    choice = ChunkChoice(**{name: texts(own, name, where="kvtool.") for name in ("chunks", "documents")})
    if choice.chunks or choice.documents or not taken(own, "spot", bool, True, where="kvtool."):
        question = replace(question, chunks=choice.chunks, documents=choice.documents, messages=())
    ask = Ask(
        question,
        replace(options, **given),
        () if grammar else stops,
        turns,
        must_find=taken(own, "strict", bool, strict, where="kvtool."),
        tools=tools,
        parallel=taken(value, "parallel_tool_calls", bool, True),
    )
    return ChatRequest(
        ask,
        stream=taken(value, "stream", bool, False),
        usage=taken(taken(value, "stream_options", dict, {}), "include_usage", bool, False, where="stream_options."),
        model=taken(value, "model", str, ""),
        user=next(filter(None, [taken(value, name, str, "") for name in USER]), ""),
    )


def _sampling(value: Mapping[str, Any]) -> dict[str, Any]:
    biases = taken(value, "logit_bias", dict, {})
    wrong = [
        token
        for token, bias in biases.items()
        if not _TOKEN.fullmatch(token) or type(bias) not in (int, float) or abs(bias) > _MAX_BIAS
    ]
    if wrong or len(biases) > _MAX_BIASES:
        what = f"logit_bias has {f'{wrong[0]!r}: {biases[wrong[0]]!r}' if wrong else f'{len(biases):,} tokens'}"
        hint = f"up to {_MAX_BIASES:,} token ids, each with a number from -{_MAX_BIAS} to {_MAX_BIAS}"
        raise Refusal(400, "wrong_type", what, hint, "logit_bias")
    return sampling_options(value) | {"logit_bias": tuple(f"{token}={float(bias):f}" for token, bias in biases.items())}


def _messages(messages: list[Any], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if (count := len(messages)) > _MAX_MESSAGES:
        raise Refusal(400, "too_many", f"messages has {count:,} items", f"at most {_MAX_MESSAGES:,}", "messages")
    said = [_message(message, where) for message, where in zip(messages, names, strict=True)]
    for before, message, where in zip([{}, *messages], messages, names, strict=False):
        if message["role"] == "tool" and before.get("role") != "tool" and not before.get("tool_calls"):
            what = f"{where} is a tool result without a preceding tool call"
            raise Refusal(400, "unsupported", what, "send the message with the call, too", where)
    return tuple(("system" if role == "developer" else role, text) for role, text in said)


def _conversation(said: Sequence[tuple[str, str]]) -> tuple[str, Turns, str]:
    system = "\n\n".join(text for role, text in said if role == "system")
    spoken = [(role, text.strip()) for role, text in said if role in ("user", "assistant")]
    if not spoken or spoken[-1][0] != "user":
        what = "messages ends with a call that has no result" if spoken else "messages has no message of the user"
        raise Refusal(400, "no_question", what, param="messages")
    if not spoken[-1][1]:
        raise UsageError("the question is empty", "ask something")
    return system, *_turns(spoken)


def _turns(spoken: list[tuple[str, str]]) -> tuple[Turns, str]:
    """Join successive messages of one role; a greeting of the assistant becomes part of the first question."""
    groups = [(role, [text for _, text in group if text]) for role, group in groupby(spoken, lambda one: one[0])]
    if groups[0][0] == "assistant":
        (_, greeting), (_, first), *later = groups
        groups = [("user", [*(f"Assistant: {text}" for text in greeting), *first]), *later]
    joined = ["\n\n".join(group) for _, group in groups]
    return tuple(zip(joined[:-1:2], joined[1::2], strict=True)), joined[-1]


def _message(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise Refusal(400, "wrong_type", f"{where} is no object", param=where)
    role = message.get("role")
    if (called := call_message(message, where)) is not None:
        return "assistant" if role == "assistant" else "user", called
    if role not in ("system", "developer", "user", "assistant"):
        text = f"{where} has the role {reprlib.repr(role)}"
        raise Refusal(400, "unsupported", text, "user, assistant or system", f"{where}.role")
    content = message.get("content")
    text = "" if content is None and role == "assistant" else text_of(content, f"{where}.content")
    return role, within(text, f"{where}.content", LONGEST_TEXT)


# ---- responses ----

_DONE = "data: [DONE]\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


@dataclass(slots=True)
class OpenAIResponse(Dialect):
    chat: bool
    model: str
    with_usage: bool = False
    with_tools: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": [_call(call) for call in answer.calls]}
        said = {"message": message} if self.chat else {"text": answer.text}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, said, answer) | {"usage": _usage(answer), "kvtool": about(answer)}

    def beginning(self, prompt: PromptTokens) -> Iterator[str]:
        if self.chat:
            yield _event(self._chunk({"role": "assistant", "content": None if self.with_tools else ""}))

    def piece(self, text: str) -> Iterator[str]:
        yield _event(self._chunk({"content": text} if self.chat else text))

    def end(self, answer: Answer) -> Iterator[str]:
        for number, call in enumerate(answer.calls):
            yield _event(self._chunk({"tool_calls": [{"index": number, **_call(call)}]}))
        last = self._chunk({} if self.chat else "", answer)
        yield _event({**last, "kvtool": about(answer)})
        if self.with_usage:
            yield _event({**last, "choices": [], "usage": _usage(answer)})
        yield _DONE

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield _event({"error": refusal.to_json()})
        yield _DONE

    def _chunk(self, said: dict[str, Any] | str, answer: Answer | None = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._object(kind, {"delta": said} if self.chat else {"text": said}, answer)

    def _object(self, kind: str, said: dict[str, Any], answer: Answer | None) -> dict[str, Any]:
        name = f"chatcmpl-{self.id}" if self.chat else f"cmpl-{self.id}"
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
    tokens = answer.facts["tokens"]
    return {
        "prompt_tokens": tokens["prompt"],
        "completion_tokens": tokens["generated"],
        "total_tokens": tokens["prompt"] + tokens["generated"],
        "prompt_tokens_details": {"cached_tokens": cached_tokens(answer)},
    }


# ---- endpoints ----

_MAX_TEXTS = 2048  # of embeddings
_EMBEDDED_AT_ONCE = 2  # requests with a thread of their own: the loop has few
_FORMATS = ("float", "base64")
_MADE = "1970-01-01T00:00:00Z"  # Anthropic's API has it so where the date is not known


class OpenAI:
    def __init__(self, answers: Answers) -> None:
        self._answers, self._engine = answers, answers.engine
        self._embedding = asyncio.Semaphore(_EMBEDDED_AT_ONCE)

    async def chat(self, request: Request) -> Response:
        return await self._answers.answered(
            request, read_chat, lambda asked, model: OpenAIResponse(True, model, asked.usage, bool(asked.ask.tools))
        )

    async def completion(self, request: Request) -> Response:
        return await self._answers.answered(
            request, read_completion, lambda asked, model: OpenAIResponse(False, model, asked.usage)
        )

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
        if not words or len(words) > _MAX_TEXTS or not all(words):
            raise Refusal(400, "wrong_input", f"input has to be 1 to {_MAX_TEXTS} texts", param="input")
        async with self._embedding:
            return *await asyncio.to_thread(self._engine.embed, words), known

    async def embed(self, request: Request) -> Response:
        value = await body_of(request)
        words, name = texts(value, "input", LONGEST_TEXT, _MAX_TEXTS), taken(value, "model", str, "")
        kind = taken(value, "encoding_format", str, "float")
        if kind not in _FORMATS:
            raise Refusal(400, "unsupported", f"there is no format {kind!r}", "float or base64", "encoding_format")
        vectors, tokens, known = await self.vectors(words, name)
        rows = [
            {"object": "embedding", "index": number, "embedding": _encoded(kind, vector)}
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
