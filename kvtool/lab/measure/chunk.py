"""One chunk of a store: where it comes from, what is stored of it, which of its tokens hang on what stands before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import UsageError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


def chunk_report(store: Store, chunk: bytes) -> dict[str, Any]:
    """`id, tokens, layers, lead_in_digest`, `levels[{level, bytes}]`, `last_used` (seconds since 1970, or None),
    `places[{source, start, end}]`, `text` of the first place, `sensitivity` by token (empty where none was kept).

    Raises
    ------
    UsageError : the chunk's description is lost.
    """
    info = store.chunk_info(chunk)
    if info is None:
        raise UsageError(f"the description of chunk {chunk.hex()[:12]} is lost", "ingest its document again")
    places, text = [], ""
    for document in store.documents():
        for ref in document.chunks:
            if ref.chunk_id == chunk:
                places.append({"source": document.source, "start": ref.start, "end": ref.end})
                text = text or document.text[ref.start : ref.end]
    return {
        "id": chunk.hex(),
        "tokens": len(info.token_ids),
        "layers": info.layers,
        "lead_in_digest": info.lead_in.hex(),
        "levels": level_rows(store.level_sizes(chunk)),
        "last_used": store.last_used().get(chunk),
        "places": places,
        "text": text,
        "sensitivity": np.frombuffer(info.sensitivity, "<f2").astype(float).tolist(),
    }


def pieces(ids: Sequence[int], weights: Sequence[float], tokenizer: Any) -> Iterator[tuple[str, float]]:
    """A text in pieces of whole characters, each with the largest weight of its tokens."""
    start = 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[start:stop]), clean_up_tokenization_spaces=False)
        if not text.endswith("\ufffd") or stop == len(ids):
            yield text, max(weights[start:stop])
            start = stop
