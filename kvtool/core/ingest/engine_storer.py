"""Batches computed by vLLM, which kvtool's connector spools in the store's folder; encoded and written here."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.common.json_text import parsed
from kvtool.core.common.types import Ids
from kvtool.core.errors import KvtoolError, ModelError, UsageError
from kvtool.core.ingest.account import Account, kv_bytes_a_token
from kvtool.core.ingest.choices import Choices
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.storer import Batch, Storer
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.tokens import encode as tokenize
from kvtool.core.records.encode import PrefilledChunk, encode, encoder_threads
from kvtool.core.records.spool import START, SaveWish, Spool
from kvtool.core.session.identity import NEIGHBOUR, ProfileCache, other_lead_in_ids

_AHEAD = 4  # batches that vLLM has at a time: what it needs to be busy, and what the spool holds
_TIMEOUT_S, _FIRST_S = 900.0, 30.0  # for one batch; for a first look at the server
_LONGEST_ANSWER = 1 << 24  # bytes
_COMPARED = 64  # tokens, at least, that are computed here, too
# Differences of keys and values as shares of their RMS. Measured: 8e-5 in float32, .016 with bfloat16 on either side.
_EXACT, _ROUNDED = 0.005, 0.05
_SAMPLE = "Zürich's 3 rivers:\n\tnaïve 水 flows — 1,024.5 km²/day"  # tokenizers differ in such a text
_OTHER_MODEL = "name with --model what vLLM serves, or start vLLM with the store's model"


def served(url: str) -> tuple[str, int]:
    """Return the name of the model that a vLLM server has, and the length of its context. Raises KvtoolError."""
    match _ask(url, "/v1/models"):
        case {"data": [{"id": str(name), "max_model_len": int(longest)}, *_]} if longest > 0:
            return name, longest
    raise KvtoolError(f"the server at {url} is not vLLM", START)


def _ask(url: str, path: str, body: Any = None, seconds: float = _FIRST_S) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.removesuffix("/") + path, data, {"Content-Type": "application/json"})
        if key := os.environ.get("VLLM_API_KEY", "").strip():
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        with build_opener(ProxyHandler({})).open(request, timeout=seconds) as answer:  # no proxy is in between
            return dict(parsed(_read(answer, time.monotonic() + seconds)))
    except HTTPError as error:
        said = error.read(500).decode("utf-8", "replace")
        raise KvtoolError(f"vLLM at {url} answers {error.code} to {path}: {said}", START) from error
    except (OSError, HTTPException, ValueError, TypeError) as error:
        raise KvtoolError(f"vLLM at {url} does not answer: {error}", START) from error


def _read(answer: HTTPResponse, deadline: float) -> bytes:
    read = bytearray()
    while piece := answer.read1(1 << 16):
        read += piece
        if len(read) > _LONGEST_ANSWER or time.monotonic() > deadline:
            raise ValueError("its answer has no end")
    return bytes(read)


class EngineStorer(Storer):
    """Storer that has vLLM compute batches, several at a time, and writes them in their order.

    With a `decoder`, some tokens are compared before anything is stored. Raises KvtoolError or ModelError.
    """

    def __init__(
        self,
        store: Store,
        writer: Writer,
        account: Account,
        options: IngestOptions,
        choices: Choices,
        decoder: Decoder | None,
    ) -> None:
        self._identity, self._level = identity, level = choices.identity, options.level
        if identity.lead_in.mode == NEIGHBOUR:
            raise UsageError("--engine computes no chunks after the lead-in 'neighbour'", "use --lead-in warm")
        self._url = options.engine or ""
        self._model, longest = served(self._url)
        super().__init__(writer, account, "cpu", longest - 1, len(identity.lead_in.ids))
        self._profile = ProfileCache(store).current() if level_of(level).nested else None
        self._flight = deque[tuple[Batch, "Future[None]"]]()
        self._since = 0.0
        self._encoders = encoder_threads()
        self._spool = Spool(store.path)
        self._other = other_lead_in_ids(identity, choices.tokenizer)
        try:
            self._check(choices)
            if decoder is not None:
                self._compare(choices, decoder)
        except BaseException:
            self.close()
            raise

    def _request(self, prompts: list[Ids], after: int = 0, other: Ids | None = None) -> None:
        params = {"kvtool": asdict(SaveWish(self._spool.name, after, other))}
        body = {"model": self._model, "prompt": prompts, "max_tokens": 1, "kv_transfer_params": params}
        _ask(self._url, "/v1/completions", body, _TIMEOUT_S)

    def _check(self, choices: Choices) -> None:
        name, theirs = choices.files.ref, None
        with suppress(KvtoolError):  # it was started without a tokenizer
            body = {"model": self._model, "prompt": _SAMPLE, "add_special_tokens": False}
            theirs = _ask(self._url, "/tokenize", body).get("tokens")
        if theirs and theirs != tokenize(choices.tokenizer, _SAMPLE):
            raise ModelError(f"vLLM's tokenizer is another one than {name}'s", _OTHER_MODEL)
        probe = self._identity.lead_in.ids or self._identity.prefix or (0,)
        self._request([probe])
        kv, _, made = self._spool.take(probe)
        dtype, size = str(kv.dtype).removeprefix("torch."), kv.nbytes // len(probe)
        if dtype != self._identity.dtype:
            raise ModelError(f"vLLM's connector saves {dtype}, as the store was when vLLM started", "restart vLLM")
        if size != (expected := kv_bytes_a_token(choices.files.folder, dtype) or size):
            raise ModelError(f"vLLM's model has {size:,} bytes of KV a token, {name} {expected:,}", _OTHER_MODEL)
        self._account.resolve(self._identity, name, made.device, made.dtype)
        self._account.events.status(f"{name} in vLLM in {made.dtype}")

    def _compare(self, choices: Choices, decoder: Decoder) -> None:
        """Compare some keys and values of vLLM's with the model's own: other weights may have the same shape."""
        text, lead_in = tokenize(choices.tokenizer, _SAMPLE), self._identity.lead_in.ids
        ids = (*text,) * -(-_COMPARED // len(text))
        self._request([lead_in + ids], len(lead_in))
        theirs, _, made = self._spool.take(ids)
        with decoder.turns.turn():
            (own,) = prefill_chunks(decoder, LeadIn(decoder, lead_in), [PrefillItem(ids)])
        pairs = [*zip(own.keys, theirs.keys, strict=True), *zip(own.values, theirs.values, strict=True)]
        squares = [((one.float() - two.float()).square().sum(), one.float().square().sum()) for one, two in pairs]
        off, size = (float(sum(side)) for side in zip(*squares, strict=True))
        exactly = {made.dtype, decoder.loaded.arithmetic.dtype, self._identity.dtype} == {"float32"}
        if not (distance := (off / size) ** 0.5) <= (_EXACT if exactly else _ROUNDED):  # or it is no number
            what = f"keys and values of vLLM's model differ by {distance:.1%} from those of {choices.files.ref}"
            raise ModelError(what, f"{_OTHER_MODEL}; --no-engine-check does not compare them")

    def store_prefix(self, prefix: ChunkSpec) -> None:
        self._request([prefix.ids])
        self._put([encode(self._read(prefix), level_of(self._level).of_prefix)])

    def finish(self) -> None:
        super().finish()
        while self._flight:
            self._store_next()

    def close(self) -> None:
        self._encoders.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self._spool.folder, ignore_errors=True)

    def _compute(self, batch: Batch) -> None:
        if len(self._flight) == _AHEAD:
            self._store_next()
        if not self._flight:
            self._since = time.perf_counter()
        lead_in = self._identity.lead_in.ids
        prompts = [lead_in + chunk.ids for chunk in batch.chunks]
        computed = Future[None]()
        asked = (computed, prompts, len(lead_in), self._other)
        # No pool, whose threads a process waits for at its end: vLLM may take minutes to answer.
        threading.Thread(target=self._fulfil, args=asked, name="kvtool-vllm", daemon=True).start()
        self._flight.append((batch, computed))

    def _fulfil(self, computed: Future[None], prompts: list[Ids], after: int, other: Ids | None) -> None:
        try:
            self._request(prompts, after, other)
        except Exception as error:
            computed.set_exception(error)
        else:
            computed.set_result(None)

    def _store_next(self) -> None:
        batch, computed = self._flight.popleft()
        computed.result()
        before, self._since = self._since, time.perf_counter()
        # Verbatim records are copies: one at a time is as fast, and needs less memory.
        several: Callable[..., Any] = map if level_of(self._level).verbatim else self._encoders.map
        encoded = partial(encode, level=self._level, profile=self._profile)
        self._store(batch, several(encoded, map(self._read, batch.chunks)), self._since - before)

    def _read(self, chunk: ChunkSpec) -> PrefilledChunk:
        return PrefilledChunk(chunk, *self._spool.take(chunk.ids))
