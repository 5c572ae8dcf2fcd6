"""Rows of results: medians over the rounds, and each contender compared with the others. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtool.core.fusion.selectors import REFERENCE
from samples.benchmarks.systems.job import Found, PeersOptions, Run
from samples.benchmarks.systems.task import KVTOOL, LLAMA, TRANSFORMERS, Contender, Measured, Saved

_TTFT = (
    "time to the first token: from the prompt's token ids to the first token's id, the likeliest, by the clock, in a "
    "process that has answered one short prompt before. kvtool: chunk descriptions looked up, records read (warm page "
    "cache), checked, decoded, rotated, rows computed; not in it: retrieval, tokenising. llama.cpp: llama_decode of "
    "all ids; from its saved state: llama_state_seq_load_file of the documents (warm page cache), then the question. "
    "Such a state serves these documents only in this order, kvtool's records any choice and order"
)
_DECODING = "tokens after the first, one at a time, greedily, without an end: decode a second"
_MEMORY = (
    "resident memory of the whole process, mapped files included: with its libraries, with the model, and the peak "
    "from then to the last token (before llama.cpp saves its state)"
)
_NUMBERS = "llama.cpp computes the file's packed weights in integers and keeps keys and values in float16"
INCLUDES = ". ".join((_TTFT, _DECODING, _MEMORY, _NUMBERS))


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One contender at one context: medians over the rounds.

    Attributes
    ----------
    count : of the rounds.
    speedup : time to the first token of the quickest llama.cpp without a saved state, over this one; None without one.
    efficiency : of a kvtool mode: (the quickest full prefill of torch's / this one) / (full FLOPs / this mode's).
    same_tokens : how many of its tokens, counted from the first, are those of kvtool's full prefill.
    """

    contender: str
    kind: str
    fusion: str
    context: int
    count: int
    ttft_ms: float
    ttft_cpu_ms: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    import_ms: float
    model_load_ms: float
    warm_ms: float
    base_bytes: int | None
    loaded_bytes: int | None
    peak_bytes: int | None
    mapped_bytes: int | None
    bytes_read: int | None
    flops: int | None
    speedup: float | None
    efficiency: float | None
    same_tokens: int | None
    saved: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Who:
    """A contender: its version, for which CPU it was built, and llama.cpp's settings."""

    contender: str
    kind: str
    version: str
    build: str
    ubatch: int | None
    flash: str | None


@dataclass(frozen=True, slots=True)
class PeersBench:
    """All rows, and what they were measured on."""

    model: str
    device: str
    dtype: str
    threads: int
    cores: int
    host: dict[str, Any]
    level: str
    chunk_tokens: int
    question_tokens: int
    new_tokens: int
    ratio: float
    link_tokens: int
    repeat: int
    contenders: tuple[Who, ...]
    rows: tuple[PeerRow, ...]
    stored: tuple[dict[str, Any], ...]
    tuning: dict[str, Any] | None
    includes: str = INCLUDES

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `peers.py`."""
        value = asdict(self)
        return {"resolved": {name: value.pop(name) for name in ("model", "device", "dtype")}} | value


def gathered(found: Found, options: PeersOptions, cores: int) -> PeersBench:
    """Make the rows of everything that was measured."""
    groups: dict[tuple[int, Contender], list[Run]] = {}
    for run in found.runs:
        groups.setdefault((run.context, run.contender), []).append(run)
    contenders = list(dict.fromkeys(run.contender for run in found.runs))
    return PeersBench(
        model=found.files.ref,
        device="cpu",
        dtype=found.dtype,
        threads=options.threads,
        cores=cores,
        host=dict(found.host),
        level=options.level,
        chunk_tokens=options.chunk_tokens,
        question_tokens=options.question_tokens,
        new_tokens=options.new_tokens,
        ratio=options.query.ratio,
        link_tokens=options.query.link_tokens,
        repeat=options.repeat,
        contenders=tuple(_who(found, contender) for contender in contenders),
        rows=tuple(row for context in options.contexts for row in _rows(context, groups)),
        stored=tuple(dict(row) for row in found.stored),
        tuning=dict(found.tuning) or None,
    )


def _who(found: Found, contender: Contender) -> Who:
    measured = next(run.measured for run in found.runs if run.contender == contender)
    settings = (contender.ubatch, contender.flash) if contender.kind == LLAMA else (None, None)
    return Who(contender.name, contender.kind, measured.version, measured.build, *settings)


def _rows(context: int, groups: dict[tuple[int, Contender], list[Run]]) -> Iterator[PeerRow]:
    here = {contender: [run.measured for run in runs] for (at, contender), runs in groups.items() if at == context}
    ttft = {contender: _middle(all_, lambda one: one.ttft_ms) for contender, all_ in here.items()}
    llama = min((taken for contender, taken in ttft.items() if contender.kind == LLAMA), default=None)
    full = Contender(KVTOOL, mode=REFERENCE)
    torch_full = min((taken for contender, taken in ttft.items() if _is_full(contender)), default=None)
    full_flops = here[full][0].flops if full in here else None
    said = here[full][0].ids if full in here else None
    for contender, all_ in here.items():
        yield _row(context, contender, all_, ttft[contender], llama, torch_full, full_flops, said)


def _is_full(contender: Contender) -> bool:
    return contender.kind == TRANSFORMERS or contender == Contender(KVTOOL, mode=REFERENCE)


def _row(
    context: int,
    contender: Contender,
    measured: Sequence[Measured],
    ttft_ms: float,
    llama_ms: float | None,
    full_ms: float | None,
    full_flops: int | None,
    full_ids: Sequence[int] | None,
) -> PeerRow:
    first = measured[0]
    saved = [one.saved for one in measured if one.saved is not None]
    return PeerRow(
        contender=contender.name,
        kind=contender.kind,
        fusion=contender.mode,
        context=context,
        count=len(measured),
        ttft_ms=ttft_ms,
        ttft_cpu_ms=_middle(measured, lambda one: one.ttft_cpu_ms),
        prefill_tokens_per_second=context / ttft_ms * 1e3,
        decode_tokens_per_second=(len(first.ids) - 1) / _middle(measured, lambda one: one.decode_ms) * 1e3,
        import_ms=_middle(measured, lambda one: one.import_ms),
        model_load_ms=_middle(measured, lambda one: one.model_load_ms),
        warm_ms=_middle(measured, lambda one: one.warm_ms),
        base_bytes=_bytes(measured, lambda one: one.base_bytes),
        loaded_bytes=_bytes(measured, lambda one: one.loaded_bytes),
        peak_bytes=_bytes(measured, lambda one: one.peak_bytes),
        mapped_bytes=_bytes(measured, lambda one: one.mapped_bytes),
        bytes_read=first.bytes_read,
        flops=first.flops,
        speedup=None if llama_ms is None else llama_ms / ttft_ms,
        efficiency=full_ms / ttft_ms / (full_flops / first.flops) if full_ms and full_flops and first.flops else None,
        same_tokens=None if full_ids is None else _alike(first.ids, full_ids),
        saved=_saved(saved) if saved else None,
    )


def _saved(saved: Sequence[Saved]) -> dict[str, Any]:
    return {
        "bytes": saved[0].bytes,
        "tokens": saved[0].tokens,
        "bytes_per_token": saved[0].bytes / saved[0].tokens,
        "save_ms": statistics.median(one.save_ms for one in saved),
        "ttft_ms": statistics.median(one.ttft_ms for one in saved),
    }


def _middle(measured: Sequence[Measured], value: Callable[[Measured], float]) -> float:
    return statistics.median(value(one) for one in measured)


def _bytes(measured: Sequence[Measured], value: Callable[[Measured], int | None]) -> int | None:
    known = [size for one in measured if (size := value(one)) is not None]
    return round(statistics.median(known)) if known else None


def _alike(said: Sequence[int], reference: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences of tokens."""
    pairs = list(zip(said, reference, strict=False))
    return next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))
