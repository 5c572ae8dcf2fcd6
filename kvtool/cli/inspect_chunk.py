"""`kvtool inspect chunk`: one chunk of the store."""

from __future__ import annotations

import time
from typing import Any

from kvtool.cli.inspect_subject import Subject
from kvtool.cli.options import Run
from kvtool.cli.sessions import unloaded_session
from kvtool.core.errors import UsageError


def chunk(run: Run, store: Any, about: Subject) -> None:
    """Tell what is stored of it; the model is not loaded."""
    from kvtool.core.cache.identity import chunk_named
    from kvtool.lab.measure.chunk import chunk_report

    if about.text is None:
        raise UsageError("inspect chunk needs a chunk's id", "`kvtool store ls` lists the documents and their chunks")
    value = chunk_report(store, chunk_named(about.text, store.chunk_ids()))
    if about.wanted:
        _page(run, store, about, value)
    run.out.result(value, human=lambda: _show(run, value))


def _page(run: Run, store: Any, about: Subject, value: dict[str, Any]) -> None:
    from kvtool.lab.charts.page import Section, Shaded, Table
    from kvtool.lab.measure.chunk import pieces

    info, tokenizer = store.chunk_info(bytes.fromhex(value["id"])), unloaded_session(run, store).tokenizer
    weights = value["sensitivity"] or [0.0] * value["tokens"]
    scale = sorted(weights)[int(0.98 * (len(weights) - 1))] or 1.0
    shaded = [(text, weight / scale) for text, weight in pieces(info.token_ids, weights, tokenizer)]
    levels = Table(("level", "bytes"), tuple((row["level"], row["bytes"]) for row in value["levels"]))
    places = Table(("document", "from", "to"), tuple((p["source"], p["start"], p["end"]) for p in value["places"]))
    text = "Shaded by how far each token's values move with what stands before the chunk (what `union` ranks by)."
    sections = [Section("Text", (text,), shaded=(Shaded(tuple(shaded)),)), Section("Stored", tables=(levels, places))]
    facts: dict[str, object] = {name: value[name] for name in ("id", "tokens", "layers", "lead_in_digest")}
    about.write_page(run, "Chunk", facts, sections)


def _show(run: Run, value: dict[str, Any]) -> None:
    used = value["last_used"]
    run.out.print(f"chunk    {value['id']}")
    for place in value["places"]:
        run.out.print(f"from     {place['source']}, characters {place['start']} to {place['end']}")
    run.out.print(f"content  {value['tokens']} tokens, {value['layers']} layers")
    for row in value["levels"]:
        run.out.print(f"level    {row['level']}: {row['bytes']:,} bytes")
    run.out.print(f"used     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(used)) if used else 'not yet'}")
    run.out.print(value["text"])
