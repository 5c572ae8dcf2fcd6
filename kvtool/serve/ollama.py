"""The API of Ollama: chat, generation, embeddings, and the list of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import kvtool
from kvtool.core.errors import KvtoolError
from kvtool.serve import requests
from kvtool.serve.answers import ANY_NAME, Answers, Dialect, about, json_line, unknown_model
from kvtool.serve.chat import Chat, Message
from kvtool.serve.job import Answer, Call
from kvtool.serve.openai import ChatMessage, LogProbs, OpenAI, Texts
from kvtool.serve.wire import Refusal, body_of, briefly, error_body

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

Kind = Literal["message", "response"]
"""The field of an answer's text: of `/api/chat`, and of `/api/generate`."""

_KEEP = re.compile(r"None|True|False|[+-]?(?:[\d.]++(?:e[+-]?\d++)?(?:[nuµm]?s|m|h)?)++", re.ASCII)
_TAG = ":latest"
_NS = 1_000_000  # of a millisecond
_VERSION = "0.14.2"  # the release of Ollama with these endpoints; VS Code refuses servers before 0.6.4

# ---- requests ----


def _duration(value: Any) -> Any:
    if not _KEEP.fullmatch(str(value)):
        raise requests.invalid("wrong_type", "{name} is not a duration", "seconds, or text such as 10m")
    return value


def _format_of(value: Any) -> Any:
    """Return a format, which is `json` or a schema, as in OpenAI's chat."""
    if isinstance(value, dict):
        return {"type": "json_schema", "schema": value}
    if value not in ("", "json"):
        raise requests.invalid("unsupported", "{name} is not known", "json, or a schema")
    return {"type": "json_object" if value else "text"}


class _Options(requests.Sampling):
    stop: requests.Stops = []


class _Message(ChatMessage):
    model_config = ConfigDict(extra="forbid")
    thinking: Any = None  # which only the model reads that has written it
    tool_name: Any = None
    tool_call_id: Any = None
    images: list[Any] = []

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.images:
            raise requests.no_text("image")
        return self


class _Body(LogProbs):
    model: requests.Name = ""
    stream: bool = True
    options: _Options = _Options()
    kvtool: requests.KvtoolOptions = requests.KvtoolOptions()
    format: Annotated[requests.Format | None, BeforeValidator(_format_of)] = None
    keep_alive: Annotated[Any, AfterValidator(_duration)] = None

    @classmethod
    def read_chat(cls, value: Mapping[str, Any]) -> Chat:
        return cls.read(value).chat()

    def chat(self, **more: Any) -> Chat:
        return Chat(
            kvtool=self.kvtool,
            options=self.options.sampling() | self.counted(),
            format=self.format,
            format_name="format",
            stop=self.options.stop,
            stream=self.stream,
            model=self.model.removesuffix(_TAG),
            **more,
        )


class ChatBody(_Body):
    messages: Annotated[list[_Message], requests.Messages] = []
    tools: Annotated[list[requests.FunctionTool], requests.ToolList, requests.ShortJson] = []

    def chat(self, **more: Any) -> Chat:
        messages = [each.message(f"messages.{number}") for number, each in enumerate(self.messages)]
        return super().chat(messages=messages, functions=[each.function for each in self.tools])


class GenerateBody(_Body):
    prompt: requests.Text = ""
    system: requests.Text = ""

    def chat(self, **more: Any) -> Chat:
        return super().chat(messages=[Message("user", self.prompt)], system=self.system)


class ShowBody(requests.Part):
    model: requests.Name = ""
    name: requests.Name = ""


class EmbedBody(requests.Body):
    model: requests.Name = ""
    input: Texts
    truncate: Literal[True] = True


# ---- responses ----


@dataclass(slots=True)
class OllamaResponse(Dialect):
    media_type: ClassVar[str] = "application/x-ndjson"
    kind: Kind
    model: str

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self.said(answer.text, answer.calls) | _end(answer)

    def piece(self, text: str) -> Iterator[str]:
        yield json_line(self.said(text) | {"done": False})

    def waiting(self) -> str:
        return json_line(self.said("") | {"done": False})

    def end(self, answer: Answer) -> Iterator[str]:
        if answer.calls:
            yield json_line(self.said("", answer.calls) | {"done": False})
        yield json_line(self.said("") | _end(answer))

    def failed(self, error: KvtoolError) -> Iterator[str]:
        yield json_line(error_body(Refusal.of(error), "/api/"))

    def said(self, text: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        said: Any = {"role": "assistant", "content": text} if self.kind == "message" else text
        if calls:  # of a message only: `/api/generate` has no tools
            said["tool_calls"] = [{"function": {"name": one.name, "arguments": one.arguments}} for one in calls]
        return {"model": self.model, "created_at": _now(), self.kind: said}


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _end(answer: Answer) -> dict[str, Any]:
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
    def __init__(self, answers: Answers, openai: OpenAI) -> None:
        self._answers, self._openai, self._engine = answers, openai, answers.engine

    def routes(self) -> list[Route]:
        return [
            Route("/api/chat", partial(self._answered, kind="message"), methods=["POST"]),
            Route("/api/generate", partial(self._answered, kind="response"), methods=["POST"]),
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/tags", self.tags),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/ps", self.running),
            Route("/api/version", self.version),
        ]

    async def _answered(self, request: Request, kind: Kind) -> Response:
        """Answer a question; a request without one loads the model, or unloads it, and it stays loaded."""
        value = await body_of(request)
        read = ChatBody.read_chat if kind == "message" else GenerateBody.read_chat
        field, question = ("messages", [{"role": "user", "content": "?"}]) if kind == "message" else ("prompt", "?")
        if value.get(field) in (None, type(question)()):
            await self._answers.parsed({**value, field: question}, read)
            keep = value.get("keep_alive")
            is_kept = keep is None or (keep.strip("0.hmsnu") if isinstance(keep, str) else keep)
            said = OllamaResponse(kind, self._engine.model_name or ANY_NAME).said("")
            return JSONResponse(said | {"done": True, "done_reason": "load" if is_kept else "unload"})
        return await self._answers.answered(request, read, lambda _, ask, model: OllamaResponse(kind, model), value)

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": await briefly(self._models)})

    async def running(self, request: Request) -> Response:
        loaded = [row for row in await briefly(self._models) if "size_vram" in row]
        rows = [row | {"expires_at": "9999-12-31T23:59:59Z"} for row in loaded]
        return JSONResponse({"models": rows})

    async def show(self, request: Request) -> Response:
        body = ShowBody.read(await body_of(request))
        given = (body.model or body.name).removesuffix(_TAG)
        rows, own = await briefly(self._models), self._engine.model_name
        name = own if given == ANY_NAME or (given and self._answers.any_model) else given
        if (row := next((row for row in rows if name and row["name"] == name + _TAG), None)) is None:
            raise unknown_model(given, own)
        decoder, capabilities = self._engine.decoder, ["completion", "tools"] if name == own else ["embedding"]
        shown = {"capabilities": capabilities, "parameters": "", "template": ""}
        if name == own and decoder is not None:
            template = decoder.loaded.tokenizer.chat_template or ""
            shown |= {"parameters": f"num_ctx {decoder.context}", "template": str(template)}
        return JSONResponse(row | shown)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": _VERSION, "kvtool": kvtool.__version__})

    def _models(self) -> list[dict[str, Any]]:
        models = {self._engine.embedder_name: None, self._engine.model_name: self._engine.decoder}
        return [_model(name, decoder) for name, decoder in reversed(models.items()) if name]

    async def embed(self, request: Request) -> Response:
        body = EmbedBody.read(await body_of(request))
        vectors, tokens, known = await self._openai.vectors(body.input, body.model.removesuffix(_TAG))
        rows = [[float(number) for number in vector] for vector in vectors]
        return JSONResponse({"model": known, "embeddings": rows, "prompt_eval_count": tokens})


def _model(name: str, decoder: Decoder | None) -> dict[str, Any]:
    row = {"name": name + _TAG, "model": name + _TAG, "modified_at": _now(), "size": 0, "digest": ""}
    details = {"format": "kvtool", "family": "", "parameter_size": "", "quantization_level": ""}
    info = {"general.architecture": "", "general.basename": name}
    if decoder is not None:
        loaded, config, kind = decoder.loaded, decoder.config, decoder.config.model_type
        weights = decoder.base if getattr(config, "tie_word_embeddings", False) else decoder.model
        count = sum(one.numel() for one in weights.parameters())
        each = ((getattr(module, "matrix", None), module) for module in decoder.model.modules())
        held = (module.parameters(recurse=False) if packed is None else [packed] for packed, module in each)
        size = sum({id(part): part.nbytes for parts in held for part in parts}.values())
        level = loaded.weights.partition(",")[0].upper().replace("FLOAT", "F")
        parameters = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
        details |= {"family": kind, "parameter_size": parameters, "quantization_level": level}
        info |= {"general.architecture": kind, "general.parameter_count": count}
        lengths = {"context": decoder.context, "embedding": config.hidden_size}
        info |= {f"{kind}.{what}_length": length for what, length in lengths.items()}
        vram = 0 if decoder.device == "cpu" else size
        row |= {"size": size, "size_vram": vram, "digest": loaded.fingerprint, "context_length": decoder.context}
    return row | {"details": details, "model_info": info}
