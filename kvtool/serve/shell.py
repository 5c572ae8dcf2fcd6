"""The application at the socket beside the store: questions of this user's `kvtool query`, with all of its options."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvtool.core.checkpoint.files import looks_local
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request as Question
from kvtool.serve.answers import EventStream
from kvtool.serve.client import PATH, placed
from kvtool.serve.engine import Engine
from kvtool.serve.facts import Facts, facts_of
from kvtool.serve.job import Answer, Ask, BusyError, LeftError
from kvtool.serve.listening import listening, while_there
from kvtool.serve.noting import Notes
from kvtool.serve.wire import Refusal, body_of, refused, status_of, texts

_SIGN_OF_LIFE = 10.0  # seconds
_CLIENT = "shell"  # where others have an address


def shell_app(engine: Engine, notes: Notes) -> ASGIApp:
    """Put the application together; whoever reaches its socket is the user."""

    async def query(request: Request) -> Response:
        try:
            value = await body_of(request)
            if not _is_same_model(engine.model, value.get("model", {})):
                raise Refusal(409, "another_model", "another model is loaded here, or elsewhere")
            if not _names_the_same(value):
                raise Refusal(409, "another_folder", "names of files are read from another folder here")
            lines = _lines(engine, _ask(value), facts_of(request))
            first = await while_there(request, anext(lines))
        except Refusal as refusal:
            return refused(refusal)
        except ClientDisconnect:
            return Response(status_code=499)
        except BusyError as error:
            facts_of(request).failed(error, 429)
            return JSONResponse({}, 429, {"Retry-After": str(error.retry_after)})
        return EventStream.of(first, lines, "application/x-ndjson")

    return notes.of(Starlette(routes=[Route(PATH, query, methods=["POST"])]), [PATH], _CLIENT)


def _is_same_model(loaded: ModelOptions, wanted: Mapping[str, Any]) -> bool:
    """Return True if the shell asks for the loaded model: its options are the same, or defaults."""
    plain, own = ModelOptions(), replace(loaded, model=placed(loaded.model))
    return all(wanted.get(name) in (getattr(plain, name), getattr(own, name)) for name in ("model", "device", "dtype"))


def _names_the_same(value: Mapping[str, Any]) -> bool:
    """Return True if file names mean the same here as in the shell: both run in one folder, or no name is relative."""
    names = [*texts(value, "chunks"), *texts(value, "documents")]
    embedder = value["options"].get("embedder")
    if embedder and (looks_local(embedder) or os.path.exists(embedder)):
        names.append(embedder)
    return all(map(os.path.isabs, names)) or value.get("folder") == os.getcwd()


def _ask(value: Mapping[str, Any]) -> Ask:
    question = Question(value["question"], texts(value, "chunks"), texts(value, "documents"))
    try:
        return Ask(question, QueryOptions.of(value["options"]), client=(_CLIENT, ""))
    except UsageError as error:  # options of another version, or of plugins that are not here
        raise Refusal(409, "other_options", error.message, error.hint) from error


async def _lines(engine: Engine, ask: Ask, facts: Facts) -> AsyncGenerator[str]:
    async with listening(engine, ask) as heard:
        begun = False
        ended: KvtoolError | None = LeftError("the shell has left")
        try:
            while not isinstance(event := await heard.next(_SIGN_OF_LIFE), Answer):
                begun = True
                yield _line({} if event is None else {"text": event})
            facts.answered(event)
            ended = None
            yield _line({"answer": told(event)})
        except BusyError as error:
            ended = error
            if not begun:
                raise
            # lines without an end, of which a shell that has seen no text yet does without this server
        except KvtoolError as error:
            ended = error
            yield _line({"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}})
        finally:
            if ended is not None:
                facts.failed(ended, status_of(ended))


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def told(answer: Answer) -> dict[str, Any]:
    """Return the parts of an answer that a shell shows."""
    return {
        "text": answer.text,
        "facts": answer.facts,
        "steps": answer.steps,
        "stepper": answer.stepper,
        "warnings": answer.warnings,
    }
