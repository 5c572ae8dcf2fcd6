"""Contexts that are streamed: chunks by level, their losses, and the speed of the other side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import RAW, base_level, exact, nested, whole
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.plan import PassSpeed
from kvtool.core.session.identity import MeasuredLosses
from kvtool.core.streaming import Ladder, Part, Rung, Task
from samples.benchmarks.streaming.speeds import GivenSpeeds, sizes_of

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

QUESTION_TOKENS = 32


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """A level's `bits` a number of K and V, all that is read for it included, and its `loss`, nats a token."""

    bits: float
    loss: float


@dataclass(frozen=True, slots=True)
class LevelTable:
    """The levels of a model, the coarsest first, and where their numbers are from."""

    levels: Mapping[str, LevelFacts]
    source: str


# Qwen2.5-Coder-0.5B on XQuAD-en, 100 questions (`kvtool inspect codec`); `lossless` is SmolLM2's on the sample corpus.
DEFAULT_LEVELS = LevelTable(
    {
        "4": LevelFacts(0.49, 0.0792),
        "3": LevelFacts(1.11, 0.0096),
        "2": LevelFacts(2.19, 0.0017),
        "1": LevelFacts(3.62, 0.0006),
        "int8": LevelFacts(8.25, 0.0017),
        "lossless": LevelFacts(16 * 562 / 821, 0.0),
        RAW: LevelFacts(16.0, 0.0),
    },
    "bits and losses of Qwen2.5-Coder-0.5B on XQuAD-en, lossless of SmolLM2",
)


def read_levels(path: Path) -> LevelTable:
    """Levels from what `inspect codec --json` or `compress --json` gave, `raw` added.

    Raises
    ------
    UsageError : the file cannot be read, or has no level with its bits and its loss.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        rows = value["schemes"] if "schemes" in value else value["levels"]
        levels = {str(row.get("scheme", row.get("level"))): _facts(row) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "--levels takes what `kvtool inspect codec --json` or `kvtool compress --json` gave"
        raise UsageError(f"{str(path)!r} has no levels with bits and losses: {error}", hint) from error
    by_size = sorted(levels.items(), key=lambda level: level[1].bits)
    return LevelTable(dict(by_size) | {RAW: LevelFacts(16.0, 0.0)}, f"bits and losses of {path}")


def _facts(row: Mapping[str, float]) -> LevelFacts:
    return LevelFacts(float(row["bits_per_element"]), float(row["kl_answer"]))


@dataclass(frozen=True, slots=True)
class Context:
    """A context in chunks.

    Attributes
    ----------
    ladders : with every level that a policy may choose from.
    fixed : by level, the chunks with only that level.
    passes : how fast prompts are computed.
    decode : seconds a token by level; a level that is not there takes none.
    sources : where sizes, losses and speeds are from, for people.
    """

    name: str
    ladders: tuple[Ladder, ...]
    fixed: Mapping[str, tuple[Ladder, ...]]
    passes: PassSpeed
    raw_bytes: int
    sources: tuple[str, ...]
    decode: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(ladder.tokens for ladder in self.ladders)

    def compute(self, texts: frozenset[int]) -> float:
        """Seconds of the pass over the question and the chunks that are computed from their text."""
        rows, keys, start = 0, 0, 0
        for ladder in self.ladders:
            if ladder.chunk in texts:
                rows += ladder.tokens
                keys += _keys(start, ladder.tokens)
            start += ladder.tokens
        return self.passes.seconds(rows + QUESTION_TOKENS, keys + _keys(start, QUESTION_TOKENS))

    def alone(self, chunk: int) -> float:
        """Return the seconds to compute one chunk without others."""
        tokens = self.ladders[chunk].tokens
        return self.passes.seconds(tokens, _keys(0, tokens))

    def text_seconds(self) -> float:
        """Return the seconds that computing the context from its text adds to the question's own pass."""
        everything = frozenset(ladder.chunk for ladder in self.ladders)
        return self.compute(everything) - self.compute(frozenset())

    def task(self, objective: float, level: str | None = None) -> Task:
        """Return the task of one request; `level`: the only level that it may fetch."""
        ladders = self.ladders if level is None else self.fixed[level]
        return Task(ladders, self.compute, objective, lambda tokens, at: tokens * self.decode.get(at, 0.0), self.alone)


def _keys(start: int, tokens: int) -> int:
    """Keys that rows start … start + tokens - 1 see."""
    return tokens * start + tokens * (tokens + 1) // 2


def shape_context(
    shape: str, context: int, chunk_tokens: int, speeds: GivenSpeeds, table: LevelTable = DEFAULT_LEVELS
) -> Context:
    """Chunks of a named shape, at the table's levels.

    Raises
    ------
    UsageError : no such shape.
    """
    from samples.benchmarks.bench.shapes import shape_config

    config = shape_config(shape)
    sizes = sizes_of(config)
    numbers = 2 * sizes["layers"] * sizes["kv_heads"] * sizes["head_dim"]  # of K and V a token
    lengths = [min(chunk_tokens, context - start) for start in range(0, context, chunk_tokens)]
    totals = [{name: round(of.bits * numbers * n / 8) for name, of in table.levels.items()} for n in lengths]
    losses = {name: of.loss for name, of in table.levels.items()}
    chunks = list(enumerate(zip(lengths, totals, strict=True)))
    return Context(
        name=shape,
        ladders=tuple(Ladder.of(i, n, _rungs(total, losses)) for i, (n, total) in chunks),
        fixed={
            name: tuple(Ladder.of(i, n, [Rung(name, loss, (Part(name, total[name]),))]) for i, (n, total) in chunks)
            for name, loss in losses.items()
        },
        passes=speeds.given() or speeds.on_gpu(config),
        raw_bytes=sum(total[RAW] for total in totals),
        sources=(table.source, *speeds.told(speeds.told_of_gpu())),
        decode=speeds.by_level(2 * numbers),
    )


def _rungs(totals: Mapping[str, int], losses: Mapping[str, float]) -> Iterator[Rung]:
    """Nested levels by what each adds to the coarser one, and the lossless one; 8 bits are no level of the store."""
    parts: list[Part] = []
    for level in reversed([name for name in nested() if name in totals]):
        parts.append(Part(level, totals[level] - sum(part.size for part in parts)))
        yield Rung(level, losses[level], tuple(parts))
    level = exact(totals)[-1]
    yield Rung(level, 0.0, (Part(level, totals[level]),))


def store_context(store: Store, context: int, speeds: GivenSpeeds, known: PassSpeed | None) -> Context:
    """The store's own chunks, document by document, with its own sizes and the losses that `compress` measured.

    Raises
    ------
    KvtoolError : nothing is stored, or a lossy level's loss or the prefill speed is not known.
    """
    passes = speeds.given() or known
    if passes is None:
        raise KvtoolError(
            "how fast this machine computes the store's model is not known",
            "give --prefill-tokens-per-second, or have it measured by `kvtool query … --fusion auto`",
        )
    chunks = list(_store_chunks(store, context))
    if not chunks:
        raise KvtoolError("the store holds no chunk whose KV is whole", "run `kvtool ingest PATH` first")
    levels = [name for name in reversed(whole()) if all(name in rungs for _, rungs, *_ in chunks)]
    if unknown := [name for name in levels if not all(name in losses for *_, losses in chunks)]:
        raise KvtoolError(
            f"what level {', '.join(unknown)} loses was never measured in this store", "run `kvtool compress` again"
        )
    numbered = list(enumerate(chunks))
    raw = sum(size for *_, size, _ in chunks)
    return Context(
        name=str(store.path),
        ladders=tuple(Ladder.of(i, n, _named(rungs, losses, levels)) for i, (n, rungs, _, losses) in numbered),
        fixed={
            name: tuple(Ladder.of(i, n, _named(rungs, losses, [name])) for i, (n, rungs, _, losses) in numbered)
            for name in levels
        },
        passes=passes,
        raw_bytes=raw,
        sources=("sizes and losses of the store", *speeds.told("prefill as measured on this machine")),
        decode=speeds.by_level(raw / sum(n for n, *_ in chunks)),
    )


def _named(rungs: Mapping[str, tuple[Part, ...]], losses: Mapping[str, float], levels: Iterable[str]) -> Iterator[Rung]:
    return (Rung(name, losses[name], rungs[name]) for name in levels)


def _store_chunks(
    store: Store, context: int
) -> Iterator[tuple[int, dict[str, tuple[Part, ...]], int, dict[str, float]]]:
    """(tokens, parts by level, bytes of its KV as it is, losses) of chunks until there are `context` tokens."""
    tokens, measured = 0, MeasuredLosses(store)
    in_order = dict.fromkeys(ref.chunk_id for document in store.documents() for ref in document.chunks)
    for chunk in in_order:
        if tokens >= context:
            return
        info, sizes = store.chunk_info(chunk), store.level_sizes(chunk)
        found = store.read_kv(chunk, next(iter(sizes)), 0) if sizes else None
        if info is None or found is None:
            continue
        tokens += len(info.token_ids)
        parts = {level: _parts(store, chunk, level, sizes) for level in sizes}
        losses = dict.fromkeys(exact(), 0.0) | measured.of(chunk, sizes)
        yield len(info.token_ids), parts, info.layers * found[0].raw_bytes, losses


def _parts(store: Store, chunk: bytes, level: str, sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """Return the parts from which a level is decoded, the coarsest first. All layers of a level refine the same one."""
    found = store.read_kv(chunk, level, 0)
    base = None if found is None else base_level(level, found[1])
    own = (Part(level, sizes[level]),)
    return own if base is None else (*_parts(store, chunk, base, sizes), *own)
