"""Results of the tools; their fields are the schema that a client is shown.

The schema is made from these classes; slots would look like defaults there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Excerpt:
    """A chunk of a document.

    Attributes
    ----------
    id : of the chunk, in hex; `read` and `answer` take it.
    place : `file:line` where the chunk begins.
    score : how well it matches, the best match of words alone is 1; None where nothing was searched for.
    since_ingest : `changed` or `gone` where the file is no longer what was ingested, so the text may be out of date.
    origin : the pack, store or signer that the document came from; empty for one that was ingested here.
    """

    id: str
    place: str
    source: str
    text: str
    score: float | None = None
    since_ingest: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Found:
    """The chunks that match a question, best first."""

    chunks: list[Excerpt]


@dataclass(frozen=True)
class Stretch:
    """A chunk with its neighbours, in the order of their document; `first` and `of` count its chunks from 1."""

    source: str
    first: int
    of: int
    chunks: list[Excerpt]


@dataclass(frozen=True)
class Answer:
    """An answer of the store's own model, and the chunks that it is based on.

    Attributes
    ----------
    finish : how the answer ended: stop, length (cut off at the longest allowed) or repeat (it began to repeat itself).
    sources : the chunks of the prompt, best first.
    fusion : the mode by which stored keys and values were fused.
    tokens : of the prompt `prompt = reused + recomputed + fresh`, and `generated`.
    ttft_ms : milliseconds from the question to the first token.
    """

    answer: str
    finish: str
    sources: list[Excerpt]
    fusion: str
    tokens: dict[str, int]
    ttft_ms: float


@dataclass(frozen=True)
class Status:
    """Contents of the store, and its model; `gate`: whether its fused answers may be trusted, None: not tested."""

    store: str
    documents: int
    chunks: int
    tokens: int
    bytes: int
    levels: list[str]
    model: str
    lead_in: str
    gate: bool | None
    roots: list[str]


@dataclass(frozen=True)
class Ingested:
    """Counts what an ingest did with documents; `failed` files are named in `problems`."""

    added: int
    changed: int
    unchanged: int
    failed: int
    chunks_computed: int
    problems: list[str]
