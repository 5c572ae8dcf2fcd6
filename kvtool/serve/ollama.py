"""The API of Ollama: chat, generation, embeddings, and the list of models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kvtool
from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import ANY_NAME, Answers, ChatRequest, Dialect, about, unknown_model
from kvtool.serve.job import Answer, Call
from kvtool.serve.openai import OpenAI, read_chat
from kvtool.serve.parameters import ENDLESS, SAMPLING, check_parameters
from kvtool.serve.wire import LONGEST_TEXT, Refusal, body_of, briefly, check_names, error_body, renamed, taken, texts

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

Kind = Literal["message", "response"]
"""The field of an answer's text: of `/api/chat`, and of `/api/generate`."""

_KNOWN = ("model", "stream", "options", "kvtool", "logprobs", "top_logprobs", "format")
_OF_MESSAGE = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id")
_KEEP = re.compile(r"None|True|False|[+-]?(?:[\d.]++(?:e[+-]?\d++)?(?:[nuµm]?s|m|h)?)++", re.ASCII)
_SAMPLING = ("stop", ENDLESS, *(name for name in SAMPLING if name != "max_tokens"))  # of `options`, as in OpenAI's chat
_TAG = ":latest"
_NS = 1_000_000  # of a millisecond
_VERSION = "0.14.2"  # the release of Ollama with these endpoints; VS Code refuses servers before 0.6.4


def read_ollama_chat(value: Mapping[str, Any], options: QueryOptions, strict: bool) -> ChatRequest:
    check_parameters(value, ("messages", "tools", *_KNOWN))
    messages = taken(value, "messages", list, [])
    for number, message in enumerate(messages):
        if isinstance(message, dict):
            check_names(message, _OF_MESSAGE, {"images": ([],)}, f"messages.{number}.")
    return _read(value, messages, options, strict)


def read_generate(value: Mapping[str, Any], options: QueryOptions, strict: bool) -> ChatRequest:
    check_parameters(value, ("prompt", "system", *_KNOWN))
    system = taken(value, "system", str, "", LONGEST_TEXT)
    messages = [{"role": "system", "content": system}] if system else []
    prompt = taken(value, "prompt", str, "", LONGEST_TEXT)
    return _read(value, [*messages, {"role": "user", "content": prompt}], options, strict)


def _read(value: Mapping[str, Any], messages: list[Any], options: QueryOptions, strict: bool) -> ChatRequest:
    if not _KEEP.fullmatch(str(value.get("keep_alive", 0))):
        raise Refusal(400, "wrong_type", "keep_alive is not a duration", "seconds, or text such as 10m", "keep_alive")
    given = taken(value, "options", dict, {})
    check_parameters(given, _SAMPLING, "options.")
    chat = {name: given.get(name) for name in _SAMPLING} | {"messages": messages, "kvtool": value.get("kvtool")}
    chat["stream"] = taken(value, "stream", bool, True)
    chat |= {name: value.get(name) for name in ("logprobs", "top_logprobs", "tools")}
    form = taken(value, "format", (str, dict))
    if isinstance(form, str) and form not in ("", "json"):
        raise Refusal(400, "unsupported", f"there is no format {form!r}", "json, or a schema", "format")
    if form:
        own = {"type": "json_schema", "schema": form}
        chat["response_format"] = {"type": "json_object"} if form == "json" else own
    chat["model"] = taken(value, "model", str, "").removesuffix(_TAG)
    with renamed(response_format="format", **{name: f"options.{name}" for name in _SAMPLING}):
        return read_chat(chat, options, strict)


@dataclass(slots=True)
class OllamaResponse(Dialect):
    media_type: ClassVar[str] = "application/x-ndjson"
    kind: Kind
    model: str

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self.said(answer.text, answer.calls) | _end(answer)

    def piece(self, text: str) -> Iterator[str]:
        yield _line(self.said(text) | {"done": False})

    def waiting(self) -> str:
        return _line(self.said("") | {"done": False})

    def end(self, answer: Answer) -> Iterator[str]:
        if answer.calls:
            yield _line(self.said("", answer.calls) | {"done": False})
        yield _line(self.said("") | _end(answer))

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield _line(error_body(refusal, "/api/"))

    def said(self, text: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        said: Any = {"role": "assistant", "content": text} if self.kind == "message" else text
        if calls:  # of a message only: `/api/generate` has no tools
            said["tool_calls"] = [{"function": {"name": one.name, "arguments": one.arguments}} for one in calls]
        return {"model": self.model, "created_at": _now(), self.kind: said}


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


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

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, "message")

    async def generate(self, request: Request) -> Response:
        return await self._answered(request, "response")

    async def _answered(self, request: Request, kind: Kind) -> Response:
        """Answer a question; a request without one loads the model, or unloads it, and it stays loaded."""
        value = await body_of(request)
        read = read_ollama_chat if kind == "message" else read_generate
        field, question = ("messages", [{"role": "user", "content": "?"}]) if kind == "message" else ("prompt", "?")
        if not taken(value, field, type(question)):
            await self._answers.parsed({**value, field: question}, read)
            keep = value.get("keep_alive")
            is_kept = keep is None or (keep.strip("0.hmsnu") if isinstance(keep, str) else keep)
            said = OllamaResponse(kind, self._engine.model_name or ANY_NAME).said("")
            return JSONResponse(said | {"done": True, "done_reason": "load" if is_kept else "unload"})
        return await self._answers.answered(request, read, lambda _, model: OllamaResponse(kind, model), value)

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": await briefly(self._models)})

    async def running(self, request: Request) -> Response:
        loaded = [row for row in await briefly(self._models) if "size_vram" in row]
        rows = [row | {"expires_at": "9999-12-31T23:59:59Z"} for row in loaded]
        return JSONResponse({"models": rows})

    async def show(self, request: Request) -> Response:
        value = await body_of(request)
        check_names(value, ("model", "name", "verbose", "options", "system", "template"))
        given = (taken(value, "model", str, "") or taken(value, "name", str, "")).removesuffix(_TAG)
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
        value = await body_of(request)
        check_names(value, ("model", "input", "keep_alive"), {"truncate": (True,), "options": ({},)})
        words = texts(value, "input", LONGEST_TEXT)
        name = taken(value, "model", str, "").removesuffix(_TAG)
        vectors, tokens, known = await self._openai.vectors(words, name)
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
