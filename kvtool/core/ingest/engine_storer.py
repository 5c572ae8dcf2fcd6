"""Batches computed by vLLM, which kvtool's connector spools in the store's folder; encoded and written here."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.common.types import Ids
from kvtool.core.errors import KvtoolError, ModelError, UsageError
from kvtool.core.ingest.account import Account, kv_bytes_a_token
from kvtool.core.ingest.choices import Choices
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.storer import Batch, Storer
from kvtool.core.model.tokens import encode as tokenize
from kvtool.core.records.encode import PrefilledChunk, encode, encoder_threads
from kvtool.core.records.spool import START, SaveWish, Spool
from kvtool.core.session.identity import NEIGHBOUR, ProfileCache, other_lead_in_ids

_AHEAD = 4  # batches that vLLM has at a time: what it needs to be busy, and what the spool holds
_TIMEOUT_S = 900.0  # for one batch
_SAMPLE = "Zürich's 3 rivers:\n\tnaïve 水 flows — 1,024.5 km²/day"  # tokenizers differ in such a text
_OTHER_MODEL = "name with --model what vLLM serves, or start vLLM with the store's model"


def served(url: str) -> tuple[str, int]:
    """Return the name of the model that a vLLM server has, and the length of its context. Raises KvtoolError."""
    model = (_ask(url, "/v1/models").get("data") or [{}])[0]
    if not model.get("max_model_len"):
        raise KvtoolError(f"the server at {url} is not vLLM", START)
    return model["id"], model["max_model_len"]


def _ask(url: str, path: str, body: Any = None) -> dict[str, Any]:
    """Send a request, and return the answer. Raises KvtoolError."""
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.removesuffix("/") + path, data, headers)
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as answer:  # no proxy is in between
            return dict(json.load(answer))
    except HTTPError as error:
        said = error.read(500).decode("utf-8", "replace")
        raise KvtoolError(f"vLLM at {url} answers {error.code} to {path}: {said}", START) from error
    except (OSError, HTTPException, ValueError, TypeError) as error:
        raise KvtoolError(f"vLLM at {url} does not answer: {error}", START) from error


class EngineStorer(Storer):
    """Storer that has vLLM compute batches, several at a time, and writes them in their order.

    Raises KvtoolError: none with the connector and this store answers; ModelError: it serves another model.
    """

    def __init__(
        self, store: Store, writer: Writer, account: Account, options: IngestOptions, choices: Choices
    ) -> None:
        self._identity, self._level = identity, level = choices.identity, options.level
        if identity.lead_in.mode == NEIGHBOUR:
            raise UsageError("--engine computes no chunks after the lead-in 'neighbour'", "use --lead-in warm")
        self._url = options.engine or ""
        self._model, longest = served(self._url)
        super().__init__(writer, account, "cpu", longest - 1, len(identity.lead_in.ids))
        self._profile = ProfileCache(store).current() if level_of(level).nested else None
        self._flight = deque[tuple[Batch, "Future[Any]"]]()
        self._since = 0.0
        self._requests, self._encoders = ThreadPoolExecutor(_AHEAD, "kvtool-vllm"), encoder_threads()
        self._spool = Spool(store.path)
        self._other = other_lead_in_ids(identity, choices.tokenizer)
        try:
            self._check(choices)
        except BaseException:
            self.close()
            raise

    def _request(self, prompts: list[Ids], after: int = 0, other: Ids | None = None) -> None:
        """Have prompts computed and saved."""
        params = {"kvtool": asdict(SaveWish(self._spool.name, after, other))}
        body = {"model": self._model, "prompt": prompts, "max_tokens": 1, "kv_transfer_params": params}
        _ask(self._url, "/v1/completions", body)

    def _check(self, choices: Choices) -> None:
        """Have a few tokens saved, and check what comes of them."""
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

    def store_prefix(self, prefix: ChunkSpec) -> None:
        """See Storer."""
        self._request([prefix.ids])
        self._put(encode(self._read(prefix), level_of(self._level).of_prefix))

    def finish(self) -> None:
        """See Storer."""
        super().finish()
        while self._flight:
            self._store_next()

    def close(self) -> None:
        """See Storer."""
        for pool in (self._requests, self._encoders):
            pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self._spool.folder, ignore_errors=True)

    def _compute(self, batch: Batch) -> None:
        if len(self._flight) == _AHEAD:
            self._store_next()
        if not self._flight:
            self._since = time.perf_counter()
        lead_in = self._identity.lead_in.ids
        prompts = [lead_in + chunk.ids for chunk in batch.chunks]
        self._flight.append((batch, self._requests.submit(self._request, prompts, len(lead_in), self._other)))

    def _store_next(self) -> None:
        batch, computed = self._flight.popleft()
        computed.result()
        before, self._since = self._since, time.perf_counter()
        for file in self._spanning(batch):
            self._writer.begin_file(file.entry.path, file.chunk_ids)
        # Verbatim records are copies: one at a time is as fast, and needs less memory.
        several: Callable[..., Any] = map if level_of(self._level).verbatim else self._encoders.map
        for records in several(
            partial(encode, level=self._level, profile=self._profile), map(self._read, batch.chunks)
        ):
            self._put(records)
        self._count(batch, self._since - before)
        self._complete(batch)

    def _read(self, chunk: ChunkSpec) -> PrefilledChunk:
        return PrefilledChunk(chunk, *self._spool.take(chunk.ids))
