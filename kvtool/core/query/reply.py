"""Request and reply of a query (`kvtool help json`), and sums of replies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.marks import Place
from kvtool.core.common.text import parsed
from kvtool.core.errors import UsageError
from kvtool.core.evaluate.measures import MEASURES, Row, means, medians
from kvtool.core.fusion.selectors import AUTO
from kvtool.core.retrieval.passages import Hit, place_and_text

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.fusion.engine import Fused
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.model.generate import Finish, Generated


_SHOWN = 400  # characters of an answer that Python shows
_CHUNKS_SHOWN = 12
DROPPED = "dropped"
NO_KV = "not stored yet"  # why a chunk was computed: it has no KV, as before its first use
OWN_TEXT = "the client's own text"
"""Why tokens of a prompt are computed that no chunk ever was (query/prompt.py)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A question, and the chunks to answer it from: by id, by document, or (neither given) by retrieval. `answers`,
    `sources`: accepted answers and documents, of an evaluation. `generator`: the model that wrote the question; "":
    people did. `search`: replaces the question as the search text. `messages`: a client's whole prompt; stored passages
    in it are reused, none is retrieved. `prefill`: the beginning of the answer. `owner`: whose learned passages and
    conversations are reused."""

    question: str
    chunks: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    id: str | None = None
    sources: tuple[str, ...] = ()
    generator: str = ""
    search: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    prefill: str = ""
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """A chunk of a prompt and its text, with the fields of `kvtool help json`."""

    id: str
    source: str
    start: int
    end: int
    line: int | None
    score: float | None
    tokens: int
    status: str
    reason: str = ""
    label: str = ""
    staleness: str = ""
    origin: str = ""
    text: str = field(default="", repr=False)

    @classmethod
    def of(cls, store: Store, hit: Hit, *, tokens: int = 0, status: str = "", reason: str = "") -> ReplyChunk:
        place, text = place_and_text(store, hit.passage)
        return cls(
            id=hit.passage.chunk_id.hex(),
            source=hit.passage.source,
            start=hit.passage.start,
            end=hit.passage.end,
            line=place.line,
            label=place.label,
            score=None if math.isnan(hit.score) else hit.score,
            tokens=tokens,
            status=status,
            reason=reason,
            origin=store.origin_of(hit.passage.source),
            text=text,
        )

    @property
    def place(self) -> str:
        """`file:line`, `file.pdf p. 12`, or only the file."""
        return self.cite(self.source)

    def cite(self, name: str) -> str:
        return Place(self.line, self.label).cite(name)

    def to_json(self) -> dict[str, Any]:
        names = ("id", "source", "start", "end", "line", "label", "score", "tokens", "status", "text")
        row = {name: getattr(self, name) for name in names}
        more = {"reason": self.reason, "staleness": self.staleness, "origin": self.origin}
        return row | {name: value for name, value in more.items() if value}

    def found(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_json().items() if name not in ("tokens", "status")}


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Neighbouring tokens with one fate. `reason`: "" where they were reused, "dropped" where no rows were stored;
    `start`, `stop`: tokens in the chunk."""

    start: int
    stop: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkSpans:
    """A chunk's tokens in order, as gapless spans of whole characters, so some tokens of a span may have been
    reused."""

    spans: tuple[TokenSpan, ...]
    counts: Mapping[str, int]

    @property
    def recomputed(self) -> dict[str, int]:
        return {reason: count for reason, count in self.counts.items() if reason not in ("", DROPPED)}

    @property
    def dropped(self) -> int:
        return self.counts.get(DROPPED, 0)

    def to_json(self) -> dict[str, Any]:
        spans = [
            {"token_start": span.start, "token_end": span.stop, "text": span.text, "reason": span.reason}
            for span in self.spans
        ]
        return {"reasons": self.recomputed, "spans": spans}


@dataclass(frozen=True, slots=True)
class Citation:
    """A sentence of a passage that a sentence of the answer rests on, with the fields of `kvtool help json`."""

    number: int
    answer_start: int
    answer_end: int
    chunk: str
    source: str
    line: int | None
    label: str
    start: int
    end: int
    text: str


def marked(answer: str, citations: Sequence[Mapping[str, Any]]) -> str:
    """Return an answer with the number of a citation after each sentence, `[1]`; `citations`: as the JSON has them."""
    for one in reversed(citations):
        end = one["answer_end"]
        answer = f"{answer[:end]} [{one['number']}]{answer[end:]}"
    return answer


@dataclass(frozen=True, slots=True)
class Round:
    """One round of `--defer`, with the fields of `kvtool help json`. `confidence`: None in a last round."""

    chunks: tuple[str, ...]
    sufficient: bool
    reason: str
    confidence: float | None
    bytes_read: int
    timing_ms: dict[str, float]
    tokens: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"chunks": list(self.chunks), "timing_ms": _rounded(self.timing_ms)}


@dataclass(frozen=True, slots=True)
class Verified:
    """Verdict of full prefill on an answer (`--verify`), with the fields of `kvtool help json`. `timing_ms`: `first`,
    `prefill` and `final`."""

    accepted: int
    drafted: int
    draft: str | None
    timing_ms: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        draft = {"corrected": self.draft is not None, **({} if self.draft is None else {"draft": self.draft})}
        counts = {"accepted": self.accepted, "drafted": self.drafted}
        return counts | draft | {"timing_ms": _rounded(self.timing_ms)}


def _rounded(timing_ms: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in timing_ms.items()}


@dataclass(slots=True, repr=False)
class Reply:
    """An answer with everything that led to it; most fields are those of `kvtool help json`.

    Attributes
    ----------
    explanations : one a chunk, where they were asked for.
    citations : in the order of the answer's sentences; None: they were not asked for.
    generated, fused : the answer's token ids and the fused cache with the first token's logits; not in the JSON. A
        verified answer's cache holds full prefill's rows.
    selector : the mode with the parameters it was asked with; not in the JSON.
    """

    question: str
    answer: str
    fusion: str
    chunks: list[ReplyChunk]
    tokens: dict[str, int]
    timing_ms: dict[str, float]
    bytes_read: int
    generated: Generated
    fused: Fused
    selector: Selector
    finish: Finish = "stop"
    revision: int = 0
    segments: dict[str, Any] | None = None
    explanations: list[ChunkSpans] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    comparison: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    controller: dict[str, Any] = field(default_factory=dict)
    stream: list[dict[str, Any]] = field(default_factory=list)
    slo: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    chunks_remaining: int = 0
    chunks_omitted: int = 0
    corrections: Sequence[dict[str, str]] = ()
    resident_chunks: list[ReplyChunk] = field(default_factory=list)
    turn: dict[str, Any] = field(default_factory=dict)
    citations: list[Citation] | None = None
    verified: Verified | None = None

    @property
    def asked_mode(self) -> str:
        return AUTO if self.controller else self.fusion

    @property
    def sources(self) -> list[ReplyChunk]:
        return sorted([*self.chunks, *self.resident_chunks], key=lambda chunk: -(chunk.score or 0))

    @property
    def places(self) -> list[str]:
        """Return the places of the prompt's chunks, as `file:line`, without duplicates, best first."""
        return list(dict.fromkeys(chunk.place for chunk in self.sources))

    @property
    def reasons(self) -> dict[str, int]:
        """Return how many tokens before the question were computed because nothing could be reused, by reason."""
        counts: dict[str, int] = {}
        for segment in self.fused.plan.segments[:-1]:
            if segment.status == "miss" and segment.ids and segment.reason != OWN_TEXT:
                counts[segment.reason] = counts.get(segment.reason, 0) + len(segment.ids)
        return counts

    def __repr__(self) -> str:
        answer = self.answer if len(self.answer) <= _SHOWN else f"{self.answer[:_SHOWN]}…"
        chunks = [f"chunk: {each.place} ({each.tokens} tokens, {each.status})" for each in self.chunks]
        if len(chunks) > _CHUNKS_SHOWN:
            chunks[_CHUNKS_SHOWN:] = [f"… {len(chunks) - _CHUNKS_SHOWN} chunks more"]
        tokens = ", ".join(f"{count} {name}" for name, count in self.tokens.items())
        ttft = f"{self.fusion}: first token after {self.timing_ms.get('ttft', 0.0):.0f} ms"
        return "\n  ".join([f"Reply({answer!r}", ttft, f"tokens: {tokens}", *chunks]) + ")"

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "question": self.question,
            "answer": self.answer,
            "finish": self.finish,
            "fusion": self.fusion,
            "revision": self.revision,
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "chunks_omitted": self.chunks_omitted,
            "tokens": self.tokens,
            "reasons": self.reasons,
            "timing_ms": _rounded(self.timing_ms),
            "bytes_read": self.bytes_read,
            **self.scores,
            **self.comparison,
        }
        if self.explanations:
            for chunk, runs in zip(row["chunks"], self.explanations, strict=True):
                chunk["explanation"] = runs.to_json()
            row["shift"] = self.fused.shifted.to_json()
        where_asked = {
            "citations": None if self.citations is None else [asdict(one) for one in self.citations],
            "corrections": [*self.corrections] or None,
            "retrieval": None if self.sources else "none",
            "rounds": [one.to_json() for one in self.rounds] or None,
            "chunks_remaining": self.chunks_remaining if self.rounds else None,
            "controller": self.controller or None,
            "slo": self.slo or None,
            "stream": self.stream if self.slo else None,
            "verified": None if self.verified is None else self.verified.to_json(),
            "turn": self.turn or None,
            "resident_chunks": [one.to_json() for one in self.resident_chunks] if self.turn else None,
            "resolved": self.resolved or None,
            "segments": self.segments,
        }
        return row | {name: value for name, value in where_asked.items() if value is not None}


def read_batch(path: Path) -> list[Request]:
    """Return the requests of a `--batch` file: one JSON object a line. Raises UsageError, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        what = f"questions cannot be read from {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        raise UsageError(what, "give a UTF-8 JSON-lines file") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(request_of(parsed(line)))
        except (ValueError, TypeError, KeyError) as error:
            why = f"no JSON: {error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise UsageError(
                f"{path}, line {number}: {why}",
                'one object a line: {"question"[, "id"][, "answers"][, "documents"][, "sources"]}',
            ) from error
    if not requests:
        raise UsageError(f"{str(path)!r} holds no question", "one JSON object a line")
    return requests


def request_of(row: Any) -> Request:
    if not isinstance(row, dict) or not isinstance(row.get("question"), str):
        raise ValueError("no question")
    lists = {name: row.get(name) or [] for name in ("answers", "chunks", "documents", "sources")}
    for name, values in lists.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{name!r} is not a list of texts")
    key = None if row.get("id") is None else str(row["id"])
    given: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    return Request(row["question"], id=key, generator=str(row.get("generator") or ""), **given)


_TIMES = ("ttft", "retrieve", "read", "recompute", "generate")
_COUNTS = ("prompt", "reused", "recomputed", "fresh")


def numbers(reply: Reply) -> Row:
    row = reply.to_json()
    counts: dict[str, Any] = {f"tokens_{name}": row["tokens"][name] for name in _COUNTS}
    counts["bytes_read"] = row["bytes_read"]
    if reply.rounds:
        counts |= {"rounds": len(reply.rounds), "chunks_loaded": len(reply.chunks)}
    if (checked := reply.verified) is not None:
        counts["uncorrected_share"] = float(checked.draft is None)
        counts["accepted_share"] = checked.accepted / checked.drafted if checked.drafted else 1.0
        counts["verified_ms"] = checked.timing_ms["final"]
    times = {f"{name}_ms": row["timing_ms"][name] for name in _TIMES}
    return {name: row[name] for name in MEASURES if name in row} | counts | times


def summarise(fusion: str, rows: Sequence[Row]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    times = medians(rows, [name for name in names if name.endswith("_ms")])
    return {
        "fusion": fusion,
        "count": len(rows),
        **means(rows, [name for name in names if name not in times]),
        **{f"{name}_median": value for name, value in times.items()},
    }
