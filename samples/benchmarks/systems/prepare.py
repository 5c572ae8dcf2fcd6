"""Input of all contenders: prompts of real text, and a store that holds their chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.codec.levels import WHOLE, level_of
from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.tokens import encode
from kvtool.core.records.encode import encode_layers
from samples.benchmarks.bench.machine import Host
from samples.benchmarks.bench.prompts import (
    LEAD_IN_TOKENS,
    BenchPrompt,
    BenchText,
    Stored,
    filled_store,
    fit_to,
    prompt_of,
)
from samples.benchmarks.systems.task import PeerPrompt, Piece, hold_to, prompts_file, text

STORE = "store"
_SEED = 0
_WEIGHED = 8  # chunks from which the levels' sizes are reported


def prepared(told: dict[str, Any]) -> dict[str, Any]:
    """Write the store and the prompts into `told["folder"]`; what a token takes at each level.

    Raises
    ------
    UsageError : a context that the model cannot hold, or that no chunk fits in.
    """
    host = Host.here(told["threads"])
    hold_to(told["threads"])
    torch.set_num_threads(told["threads"])
    folder, contexts = Path(told["folder"]), told["contexts"]
    files = resolve(told["model"], offline=told["offline"])
    decoder = Decoder(load_model(files, device="cpu", dtype=told["dtype"], packed=True))
    decoder.check_length(max(contexts) + told["new_tokens"], "take a shorter --context")
    said = _cut(decoder.loaded.tokenizer, max(contexts), told["question_tokens"], told["chunk_tokens"])
    prompts = {context: prompt_of(decoder, said, told["level"], context) for context in contexts}
    with filled_store(folder / STORE, decoder, said, list(prompts.values()), _SEED):
        pass
    written = {context: asdict(_peer(prompt)) for context, prompt in prompts.items()}
    prompts_file(folder).write_text(json.dumps(written), encoding="utf-8")
    longest = max(prompts.values(), key=lambda prompt: prompt.length)
    return {"host": host.to_json(), "rows": list(_sizes(decoder, said, longest.chunks[:_WEIGHED]))}


def _cut(tokenizer: Any, longest: int, question: int, chunk: int) -> BenchText:
    """Lead-in, body and question, in this order from the text; begun again where it is too short."""
    ids = tuple(encode(tokenizer, text()))
    needed = LEAD_IN_TOKENS + longest + question
    stream = islice(_again(ids), needed)
    lead_in, body, asked = (tuple(islice(stream, count)) for count in (LEAD_IN_TOKENS, longest, question))
    return BenchText(lead_in, asked, body, chunk)


def _again(ids: Ids) -> Iterator[int]:
    while True:
        yield from ids


def _peer(prompt: BenchPrompt) -> PeerPrompt:
    pieces = (Piece(piece.chunk_id.hex(), piece.ids, piece.level) for piece in prompt.pieces)
    return PeerPrompt(tuple(pieces), prompt.question)


def _sizes(decoder: Decoder, said: BenchText, chunks: Sequence[Stored]) -> Iterator[dict[str, Any]]:
    """Bytes a token of whole records, level by level; lossy ones by a profile of these chunks' own."""
    kvs = prefill_chunks(decoder, LeadIn(decoder, said.lead_in), [PrefillItem(chunk.ids) for chunk in chunks])
    profile, tokens = fit_to(kvs), sum(len(chunk.ids) for chunk in chunks)
    for level in WHOLE:
        used = profile if level_of(level).nested else None
        pairs = zip(chunks, kvs, strict=True)
        size = sum(len(record) for chunk, kv in pairs for record in encode_layers(chunk.chunk_id, kv, level, used))
        yield {"level": level, "bytes_per_token": size / tokens}
