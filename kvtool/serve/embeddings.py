"""`/v1/embeddings`: vectors of the store's own embedding model."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvtool.serve.engine import Engine
from kvtool.serve.wire import LONGEST_TEXT, Refusal, body_of, briefly, taken, texts

_MOST_TEXTS = 2048
_AT_ONCE = 2  # requests that have a thread: the loop has few, and others need them, too
_FORMATS = ("float", "base64")


class Embeddings:
    """The endpoint of embeddings."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._turn = engine, asyncio.Semaphore(_AT_ONCE)

    async def embed(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        value = await body_of(request)
        words, name = texts(value, "input", LONGEST_TEXT, _MOST_TEXTS), taken(value, "model", str, "")
        kind = taken(value, "encoding_format", str, "float")
        known = await briefly(lambda: self._engine.embedder_name)
        if known is None:
            raise Refusal(404, "no_embedder", "the store has no embedding model", "ingest once with --embedder MODEL")
        if name not in ("", known):
            raise Refusal(404, "model_not_found", f"there is no model {name!r}", f"this server has {known!r}", "model")
        if not words or len(words) > _MOST_TEXTS or not all(words):
            raise Refusal(400, "wrong_input", f"input has to be 1 to {_MOST_TEXTS} texts", param="input")
        if kind not in _FORMATS:
            raise Refusal(400, "unsupported", f"there is no format {kind!r}", "float or base64", "encoding_format")
        async with self._turn:
            vectors, tokens = await asyncio.to_thread(self._engine.embed, words)
        rows = [
            {"object": "embedding", "index": number, "embedding": _as(kind, vector)}
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": rows, "model": known, "usage": usage})


def _as(kind: str, vector: Any) -> list[float] | str:
    """A vector as numbers, or as the Base64 of its little-endian float32, which clients ask for by default."""
    if kind == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return [float(number) for number in vector]
