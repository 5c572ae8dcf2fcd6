"""What a query was asked for, and what came of it (CLI.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import MAX_LOSS
from kvtool.core.fusion.names import AUTO
from kvtool.core.options.settings import DEFER_FIRST, LOAD_TIMEOUT
from kvtool.core.streaming.estimate import DEFAULT_MARGIN, DEFAULT_PREDICTOR

if TYPE_CHECKING:
    from kvtool.core.fusion.engine import Fused
    from kvtool.core.model.generate import Generated
    from kvtool.core.query.defer import Round
    from kvtool.core.query.explain import ChunkRuns


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """How to answer.

    Attributes
    ----------
    system : the instruction to use instead of the store's own; the prompt's beginning is then computed fresh.
    force : answer although the gate refuses.
    slo_ms : the time to the first token that streaming from a shared store keeps to (core/query/streaming.py).
    stream_predictor, stream_margin : how the link is predicted, and the share of that which is not counted on.
    load_timeout : seconds that one record may be read for; its chunk is computed in place then.
    defer : load the best `defer_first` chunks, and more of the `top_k` only as long as the answer's beginning is less
        sure than `defer_threshold` (None: as calibrated, else the default); core/query/defer.py.
    check_layer, metric, from_depth, pooling, weighting, union_links : parameters of selectors (fusion/selectors); None:
        the mode's own.
    retriever, embedder, only, offline : see `retrieval.finder.How`.
    order : of the chunks that were found: `relevance` (best first), `best-last`, or as in their `document`s; of a
        deferred query those of each round.
    max_loss : what `level` auto may lose: KL of the answer in nats a token, as `compress` has measured it.
    """

    fusion: str = "union"
    top_k: int = 5
    ratio: float = 0.15
    link_tokens: int = 16
    link: str = "initial"
    level: str = "auto"
    max_loss: float = MAX_LOSS
    load_timeout: float = LOAD_TIMEOUT
    retriever: str = "auto"
    embedder: str | None = None
    only: tuple[str, ...] = ()
    order: str = "best-last"
    defer: bool = False
    defer_first: int = DEFER_FIRST
    defer_threshold: float | None = None
    offline: bool = False
    slo_ms: float | None = None
    stream_predictor: str = DEFAULT_PREDICTOR
    stream_margin: float = DEFAULT_MARGIN
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    system: str | None = None
    force: bool = False
    token_ids: bool = False
    explain: bool = False
    check_layer: int = 1
    metric: str = "v_sse"
    from_depth: float = 0.5
    pooling: str | None = None
    weighting: float = 1.0
    union_links: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One question, and which chunks to answer it from: by id, by document, or (neither given) by retrieval."""

    question: str
    chunks: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """A chunk of a prompt. `start`, `end`: characters in `source`; `line`: where it begins, if known."""

    id: str
    source: str
    start: int
    end: int
    line: int | None
    score: float | None
    tokens: int
    status: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        row = {
            name: getattr(self, name) for name in ("id", "source", "start", "end", "line", "score", "tokens", "status")
        }
        return row | ({"reason": self.reason} if self.reason else {})


@dataclass(slots=True)
class Reply:
    """An answer with everything that led to it.

    Attributes
    ----------
    revision : of the store: equal ones give equal answers (docs/consistency.md).
    tokens : `prompt = reused + recomputed + fresh`, and `generated`.
    timing_ms : `ttft` runs from the question's text to the first token's id.
    explained : one entry a chunk, where it was asked for.
    slo, stream : with an objective: whether it was met, and what was fetched for it (query/streaming.py).
    rounds, left : of a deferred query: what each round loaded, and how many chunks were not.
    generated, fused : the answer's token ids and the fused cache with the first token's logits; not in the JSON.
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
    revision: int = 0
    segments: dict[str, Any] | None = None
    explained: list[ChunkRuns] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    comparison: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    controller: dict[str, Any] = field(default_factory=dict)
    stream: list[dict[str, Any]] = field(default_factory=list)
    slo: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    left: int = 0

    @property
    def asked_mode(self) -> str:
        """The mode that was asked for: `fusion`, or `auto` where the controller chose it."""
        return AUTO if self.controller else self.fusion

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `query --json`."""
        row: dict[str, Any] = {
            "question": self.question,
            "answer": self.answer,
            "fusion": self.fusion,
            "revision": self.revision,
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "tokens": self.tokens,
            "timing_ms": {name: round(value, 3) for name, value in self.timing_ms.items()},
            "bytes_read": self.bytes_read,
            **({"rounds": [one.to_json() for one in self.rounds], "left": self.left} if self.rounds else {}),
            **self.scores,
            **self.comparison,
            **({"controller": self.controller} if self.controller else {}),
            **({"slo": self.slo, "stream": self.stream} if self.slo else {}),
            **({"resolved": self.resolved} if self.resolved else {}),
        }
        if self.explained:
            for chunk, runs in zip(row["chunks"], self.explained, strict=True):
                chunk["explained"] = runs.to_json()
        return row | ({"segments": self.segments} if self.segments is not None else {})


def read_batch(path: Path) -> list[Request]:
    """The requests of a `--batch` file: one JSON object a line.

    Raises
    ------
    UsageError : the file cannot be read, or a line is no request; the message names the line.
    """
    import json

    from kvtool.core.errors import UsageError

    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the batch file {str(path)!r} cannot be read: {error}", "give a UTF-8 JSON-lines file"
        ) from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{path}, line {number}: {error}", 'one object a line: {"id", "question"[, "answers"][, "documents"]}'
            ) from error
    if not requests:
        raise UsageError(f"the batch file {str(path)!r} holds no question", "one JSON object a line")
    return requests


def _request(row: Any) -> Request:
    if not isinstance(row, dict) or not isinstance(row.get("question"), str):
        raise ValueError("no question")
    lists = {name: row.get(name) or [] for name in ("answers", "chunks", "documents")}
    for name, values in lists.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{name!r} is not a list of texts")
    key = row.get("id")
    return Request(
        question=row["question"],
        chunks=tuple(lists["chunks"]),
        documents=tuple(lists["documents"]),
        answers=tuple(lists["answers"]),
        id=None if key is None else str(key),
    )
