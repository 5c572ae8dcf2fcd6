"""The API of Ollama: chat, generation, embeddings, and the list of models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kvtool
from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import Answers, ChatRequest, Trim, about
from kvtool.serve.job import Answer, Call
from kvtool.serve.openai import OpenAI, read_chat
from kvtool.serve.wire import LONGEST_TEXT, MOST_NAMES, Refusal, body_of, check_names, error_body, taken, texts

Kind = Literal["message", "response"]
"""The field of an answer's text: of `/api/chat`, and of `/api/generate`."""

_KNOWN = ("model", "stream", "options", "kvtool", "logprobs", "top_logprobs", "format")
_IGNORED = ("keep_alive",)  # the server decides
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "think": (False,),
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "raw": (False,),
    "context": ([],),
}
# Options that are parameters of a chat.
_SAMPLING = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty")
# Options of the engine and the machine, which do not change an answer.
_MACHINE = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock"),
)
_NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "repeat_penalty": (1.0,),
    "repeat_last_n": (0,),
    "mirostat": (0,),
    "tfs_z": (1.0,),
    "typical_p": (1.0,),
    "min_p": (0.0,),
}
_TAG = ":latest"
_NS = 1_000_000  # of a millisecond


def read_ollama_chat(value: Mapping[str, Any], options: QueryOptions, strict: bool) -> ChatRequest:
    """Parse a body of `/api/chat`; see `openai.read_chat`. Raises Refusal."""
    check_names(value, ("messages", "tools", *_KNOWN, *_IGNORED), _NEUTRAL)
    messages = taken(value, "messages", list, [])
    for number, message in enumerate(messages):
        if isinstance(message, dict):
            check_names(message, ("role", "content", "thinking", "tool_calls", "tool_name"), {"images": ([],)})
            if not message.get("tool_calls") and not isinstance(message.get("content"), str):
                raise Refusal(400, "unsupported", f"messages.{number} has no text", param=f"messages.{number}.content")
    return _read(value, messages, options, strict)


def read_generate(value: Mapping[str, Any], options: QueryOptions, strict: bool) -> ChatRequest:
    """Parse a body of `/api/generate`, whose prompt is the question; see `openai.read_chat`. Raises Refusal."""
    check_names(value, ("prompt", "system", *_KNOWN, *_IGNORED), _NEUTRAL)
    system = taken(value, "system", str, "", LONGEST_TEXT)
    messages = [{"role": "system", "content": system}] if system else []
    prompt = taken(value, "prompt", str, "", LONGEST_TEXT)
    return _read(value, [*messages, {"role": "user", "content": prompt}], options, strict)


def _read(value: Mapping[str, Any], messages: list[Any], options: QueryOptions, strict: bool) -> ChatRequest:
    given = taken(value, "options", dict, {})
    temperature = given.get("temperature", options.temperature)
    greedy = {"top_k": (given.get("top_k"),)} if temperature == 0 else {"top_k": (0,)}  # it then changes nothing
    check_names(given, ("num_predict", *_SAMPLING, *_MACHINE), _NEUTRAL_OPTIONS | greedy)
    chat = {name: given.get(name) for name in _SAMPLING} | {"messages": messages, "kvtool": value.get("kvtool")}
    most = taken(given, "num_predict", int, -1)
    chat["max_tokens"] = most if most >= 0 else None
    chat["stream"] = taken(value, "stream", bool, True)
    chat |= {name: value.get(name) for name in ("logprobs", "top_logprobs", "tools")}
    form = taken(value, "format", (str, dict))
    if isinstance(form, str) and form not in ("", "json"):
        raise Refusal(400, "unsupported", f"there is no format {form!r}", "json, or a schema", "format")
    if form:
        schema = {"type": "object"} if form == "json" else form
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return read_chat(chat | {"model": taken(value, "model", str, "").removesuffix(_TAG)}, options, strict)


@dataclass(slots=True)
class OllamaResponse:
    """Response of `/api/chat` or `/api/generate`: an object, or one object a line."""

    media_type: ClassVar[str] = "application/x-ndjson"
    kind: Kind
    model: str
    _trim: Trim = field(default_factory=Trim)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the object of a complete answer."""
        return self._said(answer.text, answer.calls) | _end(answer)

    def beginning(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def piece(self, text: str) -> Iterator[str]:
        """Yield the line of a piece of text."""
        if shown := self._trim.piece(text):
            yield _line(self._said(shown) | {"done": False})

    def waiting(self) -> str:
        """Return an event that changes nothing."""
        return _line(self._said("") | {"done": False})

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the last line."""
        if answer.calls:
            yield _line(self._said("", answer.calls) | {"done": False})
        yield _line(self._said("") | _end(answer))

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the line of an error within a stream."""
        yield _line(error_body(refusal, "/api/"))

    def _said(self, text: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        said: Any = {"role": "assistant", "content": text} if self.kind == "message" else text
        if calls:  # of a message only: `/api/generate` has no tools
            said["tool_calls"] = [{"function": {"name": one.name, "arguments": one.arguments}} for one in calls]
        return {"model": self.model, "created_at": _now(), self.kind: said}


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _end(answer: Answer) -> dict[str, Any]:
    """Return the fields of a complete answer; its times are in nanoseconds, the time to the first token is all of the
    prompt's."""
    tokens, times = answer.facts["tokens"], answer.facts["timing_ms"]
    first, later = times["ttft"], times.get("generate", 0.0)
    end = {
        "done": True,
        "done_reason": answer.finish,
        "total_duration": round((answer.queue_ms + first + later) * _NS),
        "load_duration": 0,
        "prompt_eval_count": tokens["prompt"],
        "prompt_eval_duration": round(first * _NS),
        "eval_count": tokens["generated"],
        "eval_duration": round(later * _NS),
        "kvtool": about(answer),
    }
    return end if answer.logprobs is None else end | {"logprobs": answer.logprobs}


class Ollama:
    """Endpoints of Ollama's API. `openai` computes embeddings."""

    def __init__(self, answers: Answers, openai: OpenAI) -> None:
        self._answers, self._openai, self._engine = answers, openai, answers.engine

    async def chat(self, request: Request) -> Response:
        """`POST /api/chat`."""
        return await self._answered(request, "message")

    async def generate(self, request: Request) -> Response:
        """`POST /api/generate`."""
        return await self._answered(request, "response")

    async def _answered(self, request: Request, kind: Kind) -> Response:
        read = read_ollama_chat if kind == "message" else read_generate
        return await self._answers.answered(request, read, lambda _, model: OllamaResponse(kind, model))

    async def tags(self, request: Request) -> Response:
        """`GET /api/tags`: the language model and the embedding model."""
        names = filter(None, (self._engine.model_name, self._engine.embedder_name))
        return JSONResponse({"models": [_model(name + _TAG) for name in names]})

    async def version(self, request: Request) -> Response:
        """`GET /api/version`."""
        return JSONResponse({"version": kvtool.__version__})

    async def embed(self, request: Request) -> Response:
        """`POST /api/embed`: vectors of the store's own embedding model."""
        value = await body_of(request)
        check_names(value, ("model", "input", *_IGNORED), {"truncate": (True,), "options": ({},)})
        words = texts(value, "input", LONGEST_TEXT, MOST_NAMES)
        name = taken(value, "model", str, "").removesuffix(_TAG)
        vectors, tokens, known = await self._openai.vectors(words, name)
        rows = [[float(number) for number in vector] for vector in vectors]
        return JSONResponse({"model": known, "embeddings": rows, "prompt_eval_count": tokens})


def _model(name: str) -> dict[str, Any]:
    details = {"format": "kvtool", "family": "", "parameter_size": "", "quantization_level": ""}
    return {"name": name, "model": name, "modified_at": _now(), "size": 0, "digest": "", "details": details}
