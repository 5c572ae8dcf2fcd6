"""Time to the first token of every fusion mode, next to full prefill and the limit of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.load import resolve_device
from kvtool.core.common.machine import FLOAT32, cores, why_float32
from kvtool.core.common.text import counted
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import Fused, FuseTiming, fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.fusion.source import StoreSource
from kvtool.core.kernels.linear.modules import keep_few_kernels, pack_weights
from kvtool.core.model.decoder import Decoder
from kvtool.core.session.identity import ProfileCache
from kvtool.reports.report import Table
from samples.benchmarks.bench.machine import (
    Architecture,
    Host,
    Machine,
    Work,
    flops,
    full_work,
    fused_work,
    limit_of,
    measure_machine,
    synchronize,
    windows_of,
)
from samples.benchmarks.bench.plain import attention_of_transformers
from samples.benchmarks.bench.prompts import BenchPrompt, Sizes, scratch_store, stored_prompts
from samples.benchmarks.bench.shapes import PUBLISHED, build_shape, shape_dtype

if TYPE_CHECKING:
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session

PLAIN = "transformers sdpa"  # a name next to those of modes
INCLUDES = (
    "from the question's ids to the first token's id (argmax): chunk descriptions looked up, prompt laid out, records "
    "read (warm page cache), checked, decoded, uploaded, rotated, rows selected and computed, LM head of one row; not "
    "in it: retrieval, tokenising, loading of the model and of the codec's profile"
)
PLAIN_INCLUDES = "one call of the model on the same ids with sdpa attention, a cache and the logits of the last row"
SEED = 0


@dataclass(frozen=True, slots=True)
class FusionOptions:
    """Options of the measurement; `query` holds the modes' parameters.

    Attributes
    ----------
    skip_full_above : longer prompts are not prefilled in full: attention over all of 32,000 tokens takes minutes, and
        the limits that a mode is measured against do not need it.
    """

    modes: tuple[str, ...]
    sizes: Sizes
    level: str
    repeat: int
    query: QueryOptions
    skip_full_above: int | None = None

    def measured(self, length: int) -> tuple[str, ...]:
        """The modes of one prompt, full prefill by both first unless that takes too long."""
        if self.skip_full_above is not None and length > self.skip_full_above:
            return tuple(mode for mode in self.modes if mode != REFERENCE)
        return tuple(dict.fromkeys((PLAIN, REFERENCE, *self.modes)))


def passes(options: FusionOptions) -> int:
    """Return the largest number of passes: the work of a progress bar."""
    modes = sum(len(options.measured(context)) for context in options.sizes.contexts)
    return modes * (options.repeat + 1)


def bench_shape(name: str, device: str, dtype: str, options: FusionOptions, events: Events) -> dict[str, Any]:
    """Measure a model of a named shape with random weights, over chunks of random tokens in a temporary store.

    Raises
    ------
    UsageError : no such shape, device or mode; a context that is too short, or too long for the model.
    """
    events.status(_making(name, device, dtype))
    loaded = build_shape(name, device, dtype, SEED)
    keep_few_kernels()
    pack_weights(loaded.model)
    decoder = Decoder(loaded)
    decoder.check_length(max(options.sizes.contexts), "take a shorter --context")

    def report(done: int, total: int) -> None:
        events.status(f"prefill chunks, {done} of {total} tokens")

    with scratch_store(decoder, options.level, options.sizes, SEED, report) as (store, prompts):
        return _bench(decoder, store, prompts, options, events, name)


def _making(name: str, device: str, dtype: str) -> str:
    """Return the step's label: what is made, and why it is not bfloat16 if it could be."""
    if dtype != "auto":
        return f"make {name} in {dtype}"
    kind = shape_dtype(resolve_device(device))
    return f"make {name} in {kind}" + (f": {why_float32(PUBLISHED)}" if kind == FLOAT32 else "")


def bench_store(store: Store, session: Session, options: FusionOptions, events: Events) -> dict[str, Any]:
    """Measure a store's own model over its own chunks.

    Raises
    ------
    UsageError : no such mode; a context that is too short, or too long for the model.
    KvtoolError : no chunk is stored at the level.
    DamagedError : a record is damaged.
    """
    sizes = options.sizes
    prompts = stored_prompts(store, session.identity, options.level, sizes.contexts, sizes.question_tokens)
    for prompt in prompts:
        session.decoder.check_length(prompt.length, "take a shorter --context")
    return _bench(session.decoder, store, prompts, options, events, None)


def _bench(
    decoder: Decoder,
    store: Store,
    prompts: Sequence[BenchPrompt],
    options: FusionOptions,
    events: Events,
    shape: str | None,
) -> dict[str, Any]:
    different = list({prompt.length: prompt for prompt in reversed(prompts)}.values())[::-1]
    answerer = Answerer(decoder, store, options.query)
    events.status("warm up")
    warm_up(answerer, prompts[0], options.measured(0))
    events.status("measure what the machine could do")
    machine = measure_machine(decoder)
    measured = [_measure(answerer, prompt, options, events) for prompt in different]
    events.status("measure what the machine could do, once more")
    machine = machine.best(measure_machine(decoder))
    about = About(Architecture.of(decoder), machine, decoder)
    model = shape or decoder.loaded.files.ref
    return {
        "resolved": {"model": model, "device": decoder.device, "dtype": decoder.loaded.dtype},
        "shape": shape,
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "parameters": sum(weight.numel() for weight in decoder.model.parameters()),
        "model_bytes": sum(weight.nbytes for weight in decoder.model.parameters()),
        "level": options.level,
        "chunk_tokens": options.sizes.chunk_tokens if shape else None,  # None: the store's own
        "ratio": options.query.ratio,
        "link_tokens": options.query.link_tokens,
        "repeat": options.repeat,
        "seed": SEED,
        "host": Host.here().to_json(),
        "machine": machine.to_json(),
        "references": [asdict(one.reference) for one in measured],
        "rows": [row for one in measured for row in rows_of(one, about, options.modes)],
        "notes": [] if shape else [*_shortfalls(prompts, options.level)],
        "includes": INCLUDES,
        "plain_includes": PLAIN_INCLUDES,
    }


def _shortfalls(prompts: Sequence[BenchPrompt], level: str) -> Iterator[str]:
    """Contexts for which the store has not enough."""
    for prompt in prompts:
        if prompt.holds_all and prompt.length < prompt.wanted:
            yield (
                f"all {len(prompt.chunks)} chunks of the store at level {level} make a prompt of {prompt.length} "
                f"tokens: {prompt.wanted} were asked for"
            )


def _measure(answerer: Answerer, prompt: BenchPrompt, options: FusionOptions, events: Events) -> Measured:
    """Every mode once a round, so that a slow moment of the machine meets all of them."""
    modes = options.measured(prompt.length)
    facts = {}
    for mode in modes:
        events.status(f"{prompt.length} tokens, {mode}")
        facts[mode] = answerer.facts(prompt, mode)
        events.advance(1)
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    for _ in range(options.repeat):
        for mode in modes:
            events.status(f"{prompt.length} tokens, {mode}")
            samples[mode].append(answerer.sample(prompt, mode))
            events.advance(1)
    return Measured(prompt, samples, facts)


@dataclass(frozen=True, slots=True)
class Sample:
    """A timed pass, in milliseconds; `plan_ms` is a part of `ttft_ms`."""

    ttft_ms: float
    plan_ms: float = 0.0
    timing: FuseTiming | None = None


@dataclass(frozen=True, slots=True)
class ModeWork:
    """Work of a mode on a prompt, the same in every pass.

    Attributes
    ----------
    passes : rows and keys, layer by layer.
    rows : computed at each layer of the main pass.
    """

    passes: tuple[Work, ...]
    rows: tuple[int, ...]
    bytes_read: int


class Answerer:
    """Answers prompts from one store; profiles are read once, as a session does."""

    def __init__(self, decoder: Decoder, store: Store, options: QueryOptions) -> None:
        self.decoder = decoder
        self._store, self._options = store, options
        self._profiles = ProfileCache(store)

    def sample(self, prompt: BenchPrompt, mode: str) -> Sample:
        """Time one pass."""
        return self._plain(prompt) if mode == PLAIN else self._fused(prompt, mode)[0]

    def facts(self, prompt: BenchPrompt, mode: str) -> ModeWork:
        """Count what one pass computes and reads; nothing is timed."""
        windows = windows_of(self.decoder)
        if mode == PLAIN:
            return ModeWork((full_work(prompt.length, windows),), (prompt.length,) * len(windows), 0)
        fused = self._fused(prompt, mode)[1]
        _check_whole(fused)
        passes = tuple(fused_work(fused, selector_for(self._options, mode), windows))
        return ModeWork(passes, fused.tokens.rows, fused.bytes_read)

    def _plain(self, prompt: BenchPrompt) -> Sample:
        plan = prompt.plan(self._store)
        model, device = self.decoder.model, self.decoder.device
        with attention_of_transformers(self.decoder), torch.inference_mode():
            synchronize(device)
            started = time.perf_counter()
            ids = torch.tensor([plan.ids], device=device)
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            int(out.logits[0, -1].argmax())
            synchronize(device)
            return Sample((time.perf_counter() - started) * 1e3)

    def _fused(self, prompt: BenchPrompt, mode: str) -> tuple[Sample, Fused]:
        decoder = self.decoder
        synchronize(decoder.device)
        started = time.perf_counter()
        source = StoreSource(self._store, decoder, self._profiles)
        plan = prompt.plan(self._store)
        planned = time.perf_counter()
        fused = fuse(decoder, plan, selector_for(self._options, mode), source)
        int(fused.logits.argmax())
        synchronize(decoder.device)
        ended = time.perf_counter()
        return Sample((ended - started) * 1e3, (planned - started) * 1e3, fused.timing), fused


def _check_whole(fused: Fused) -> None:
    """A hole is computed in place: times would not be those of reuse."""
    holes = [segment for segment in fused.plan.segments[:-1] if segment.status == "miss" and segment.ids]
    if holes:
        raise DamagedError(f"a record cannot be used: {holes[0].reason}", REPAIR)


def warm_up(answerer: Answerer, prompt: BenchPrompt, modes: Sequence[str]) -> None:
    """Every mode once over a short prompt: machine code, tables and handles are made at the first call."""
    for mode in modes:
        answerer.sample(prompt.shortest(), mode)


@dataclass(frozen=True, slots=True)
class Reference:
    """Full prefill of one context, by `transformers` and by kvtool; milliseconds, medians; None: not measured."""

    context: int
    context_wanted: int
    chunks: int
    question_tokens: int
    transformers_ms: float | None
    kvtool_ms: float | None

    @property
    def ms(self) -> float | None:
        """The faster one's."""
        return min((ms for ms in (self.transformers_ms, self.kvtool_ms) if ms is not None), default=None)

    @property
    def name(self) -> str:
        """Return the name of the faster reference."""
        if self.ms is None:
            return ""
        return PLAIN if self.transformers_ms == self.ms else "kvtool full"


@dataclass(frozen=True, slots=True)
class Measured:
    """A prompt's samples and facts by mode."""

    prompt: BenchPrompt
    samples: Mapping[str, Sequence[Sample]]
    facts: Mapping[str, ModeWork]

    @property
    def reference(self) -> Reference:
        """Full prefill."""
        return Reference(
            context=self.prompt.length,
            context_wanted=self.prompt.wanted,
            chunks=len(self.prompt.chunks),
            question_tokens=len(self.prompt.question),
            transformers_ms=self._median(PLAIN),
            kvtool_ms=self._median(REFERENCE),
        )

    def _median(self, mode: str) -> float | None:
        samples = self.samples.get(mode)
        return statistics.median(sample.ttft_ms for sample in samples) if samples else None


@dataclass(frozen=True, slots=True)
class About:
    """The context of the rows in addition to their own samples."""

    architecture: Architecture
    machine: Machine
    decoder: Decoder


def rows_of(measured: Measured, about: About, modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON row of each of these modes that was measured.

    Times are medians over the rounds, each part separately. `full_ms`, `reference`: the faster of `transformers`' own
    prefill and kvtool's mode `full`, and its name; None and "" if neither was measured. `speedup`: full_ms / ttft_ms.
    `flops_ratio`: full FLOPs / this mode's FLOPs. `efficiency`: speedup / flops_ratio. `load_ms`: read + decode +
    upload + rotate, in the loader's thread. `compute_ms`: all else but waiting for it, with `select_ms` (the question's
    own pass included) and `shift_ms` as parts. `overlap`: ttft_ms / max(load_ms, compute_ms), 1 at best. `limit_ms`:
    the roofline, the larger of `compute_limit_ms` and `load_limit_ms`. `roofline_efficiency`: limit_ms / ttft_ms.
    `rows_by_layer`: computed rows of the main pass. `layer_bytes`: the KV of one layer of the prompt.
    """
    reference = measured.reference
    for mode in (mode for mode in modes if mode in measured.samples):
        yield _row(mode, measured.samples[mode], measured.facts[mode], reference, about)


def _row(mode: str, samples: Sequence[Sample], work: ModeWork, reference: Reference, about: About) -> dict[str, Any]:
    ttft = statistics.median(sample.ttft_ms for sample in samples)
    parts = _parts(samples)
    done = flops(about.architecture, work.passes)
    ratio = flops(about.architecture, [full_work(reference.context, about.architecture.windows)]) / done
    kv_bytes = about.decoder.kv_bytes(reference.context)
    bytes_each = about.decoder.dtype.itemsize
    limit = limit_of(about.machine, about.architecture, bytes_each, work.passes, work.bytes_read)
    speedup = None if reference.ms is None else reference.ms / ttft
    return {
        "fusion": mode,
        "context": reference.context,
        "ttft_ms": ttft,
        "speedup": speedup,
        "flops_ratio": ratio,
        "efficiency": None if speedup is None else speedup / ratio,
        **parts,
        "overlap": ttft / max(parts["load_ms"], parts["compute_ms"]),
        "bytes_read": work.bytes_read,
        "rows_by_layer": [*work.rows],
        "rows_total": sum(work.rows),
        "flops": done,
        "full_ms": reference.ms,
        "reference": reference.name,
        "limit_ms": limit.ms,
        "compute_limit_ms": limit.compute_ms,
        "load_limit_ms": limit.load_ms,
        "roofline_efficiency": limit.ms / ttft,
        "kv_bytes": kv_bytes,
        "layer_bytes": kv_bytes // len(about.architecture.layers),
    }


def _parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians of the parts of the time to the first token."""
    timings = [sample.timing for sample in samples if sample.timing is not None]

    def middle(*names: str) -> float:
        return float(statistics.median(sum(getattr(timing, name) for name in names) for timing in timings))

    return {
        **{f"{name}_ms": middle(name) for name in ("read", "decode", "upload", "rotate", "select", "shift", "wait")},
        "load_ms": middle("read", "decode", "upload", "rotate"),
        "compute_ms": middle("recompute", "select", "shift"),
        "plan_ms": statistics.median(sample.plan_ms for sample in samples),
    }


# ---- for people ----

_MEANING = (
    "speedup: full prefill / TTFT; FLOPs: those of full / of this mode; efficiency: speedup / FLOPs. Milliseconds: "
    "load = read + decode + upload + rotate, in a thread of its own (selection included); wait: for it; overlap: "
    "TTFT / the larger of load and compute. limit: by layer the slower of its FLOPs and its weights, or all bytes "
    "read, at the speeds above"
)


def fusion_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of each mode's speed, its time by part, and its bytes and limits, for 80 columns."""
    rows, head = result["rows"], ("fusion", "context")
    speed = (*head, "TTFT ms", "speedup", "FLOPs", "efficiency", "of limit")
    yield Table(speed, tuple(_speeds(result)), "time to the first token")
    parts = ("read", "decode", "load", "wait", "select", "shift", "compute")
    times = ((row["fusion"], row["context"], *(_ms(row[f"{part}_ms"]) for part in parts)) for row in rows)
    yield Table((*head, *parts), tuple(times), "milliseconds by part")
    sizes = (
        (row["fusion"], row["context"], f"{row['overlap']:.2f}", _ms(row["limit_ms"]), f"{row['bytes_read'] / 1e6:.1f}")
        for row in rows
    )
    yield Table((*head, "overlap", "limit ms", "MB read"), tuple(sizes), "limits")


def _speeds(result: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield full prefill by both before each context's modes."""
    for one in (Reference(**row) for row in result["references"]):
        for name, ms in (("transformers", one.transformers_ms), ("full, kvtool", one.kvtool_ms)):
            if ms is not None and one.ms is not None:
                speedup = f"{one.ms / ms:.2f}"
                yield (name, one.context, _ms(ms), speedup, "1.00", speedup, "")
        yield from (_speed(row) for row in result["rows"] if row["context"] == one.context)


def _speed(row: Mapping[str, Any]) -> tuple[Any, ...]:
    speedup, efficiency = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("speedup", "efficiency"))
    return (
        *(row["fusion"], row["context"], _ms(row["ttft_ms"]), speedup),
        *(f"{row['flops_ratio']:.2f}", efficiency, f"{row['roofline_efficiency']:.0%}"),
    )


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds < 1e3 else f"{milliseconds:.0f}"


def fusion_notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Describe the measurement, its limits, and the meaning of the numbers."""
    machine, (model, device, dtype) = result["machine"], result["resolved"].values()
    weights = "random weights" if result["shape"] else "its own weights"
    yield (
        f"{model} ({result['parameters'] / 1e6:.4g} M parameters, {weights}, {result['model_bytes'] / 1e6:.4g} MB) "
        f"on {device} in {dtype}; level {result['level']}, ratio {result['ratio']:g}, "
        f"{result['link_tokens']} link tokens; medians of {result['repeat']} rounds"
    )
    yield Host(**result["host"]).line()
    for one in (Reference(**row) for row in result["references"]):
        full = "not measured" if one.ms is None else f"{one.name}, {one.ms:.1f} ms"
        yield (
            f"{one.context} tokens: {counted(one.chunks, 'chunk')} and a question of {one.question_tokens}; "
            f"full prefill is {full}"
        )
    upload = f", upload {machine['upload_bytes_per_s'] / 1e9:.1f} GB/s" if machine["upload_bytes_per_s"] else ""
    yield (
        f"its limits: products in {dtype} {machine['gemm_flop_per_s'] / 1e12:.3f} TFLOP/s, weights read at "
        f"{machine['weights_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"memcpy {machine['memcpy_bytes_per_s'] / 1e9:.1f} GB/s{upload}"
    )
    yield _MEANING
    yield f"TTFT: {result['includes']}"
    yield f"full, transformers: {result['plain_includes']}"
