"""`kvtool inspect chunk`: places, text and stored levels of a chunk, and the tokens that depend on earlier text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtool.core.common.json_text import level_rows
from kvtool.core.common.marks import Place, as_named_here
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.reports.page import Quote, Shown, Table
from kvtool.reports.report import Report, ReportContext, ReportResult

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


def chunk(context: ReportContext) -> ReportResult:
    """Show one chunk: its document, its text, what is stored of it; the model is not loaded."""
    from kvtool.core.cache.identity import chunk_named, is_id
    from kvtool.core.retrieval.finder import Places

    if context.about is None:
        raise UsageError("inspect chunk needs a chunk's id, or its place", "`kvtool store ls --chunks` lists both")
    if is_id(context.about):
        named, more = chunk_named(context.about, context.store.chunk_ids()), []
    else:
        named, *more = (passage.chunk_id for passage in Places(context.store).of_chunks(context.about))
    value = chunk_facts(context.store, named) | {"other_chunks": [other.hex() for other in more]}
    return ReportResult("Chunk", value, [*_summary(value)], _tokens(context, value))


def chunk_facts(store: Store, chunk: bytes) -> dict[str, Any]:
    """Make the JSON of `inspect chunk`. Raises UsageError if the chunk's description is lost."""
    import numpy as np

    info = store.chunk_info(chunk)
    if info is None:
        raise UsageError(f"the description of chunk {chunk.hex()[:12]} is lost", "ingest its document again")
    places, text = [], ""
    for document in store.documents():
        for ref in document.chunks:
            if ref.chunk_id == chunk:
                row = {"source": document.source, "start": ref.start, "end": ref.end}
                places.append(row | asdict(document.place(ref.start, ref.end)))
                text = text or document.text[ref.start : ref.end]
    return {
        "id": chunk.hex(),
        "origin": store.origin(chunk).name,
        "tokens": len(info.token_ids),
        "layers": info.layers,
        "lead_in_digest": info.lead_in.hex(),
        "levels": level_rows(store.level_sizes(chunk)),
        "last_used": store.last_used().get(chunk),
        "places": places,
        "text": text,
        "sensitivity": np.frombuffer(info.sensitivity, "<f2").astype(float).tolist(),
    }


def _summary(value: Mapping[str, Any]) -> Iterator[Shown]:
    used = value["last_used"]
    yield f"chunk    {value['id']}"
    for place in value["places"]:
        yield f"from     {_where(place)}"
    if value["origin"]:
        yield f"made by  {value['origin']}"
    yield f"content  {value['tokens']} tokens, {value['layers']} layers"
    for row in value["levels"]:
        yield f"level    {row['level']}: {row['bytes']:,} bytes"
    yield f"used     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(used)) if used else 'not yet'}"
    for other in value["other_chunks"]:
        yield f"also     chunk {other} holds something of that place"
    yield Quote(value["text"])


def _where(place: Mapping[str, Any]) -> str:
    cited = Place(place["line"], place["label"]).cite(as_named_here(place["source"]))
    return f"{cited}, characters {place['start']} to {place['end']}"


def _tokens(context: ReportContext, value: Mapping[str, Any]) -> Iterator[Table]:
    from kvtool.core.model.tokens import whole_characters

    info, weights = context.store.chunk_info(bytes.fromhex(value["id"])), value["sensitivity"]
    if info is not None and weights:
        pieces = whole_characters(context.session.tokenizer, info.token_ids)
        rows = ((text, f"{max(weights[start:stop]):.3g}") for start, stop, text in pieces)
        yield Table(("token", "sensitivity"), tuple(rows), "how far a token's values depend on text before the chunk")


REPORT = Report(
    chunk,
    takes=(ModelOptions.some("model", "offline"),),
    about="ID|PATH:LINE",
    about_help="The first six or more digits of a chunk's id, or a place as answers cite it.",
    examples=("inspect chunk 3f2a91 --html chunk.html", "inspect chunk notes.md:12", 'inspect chunk "paper.pdf p. 3"'),
)
