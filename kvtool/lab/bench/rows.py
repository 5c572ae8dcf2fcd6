"""What is told of a mode: its times, what they are measured against, and what it costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtool.core.fusion.selectors import REFERENCE
from kvtool.lab.bench.flops import Architecture, flops, full_work
from kvtool.lab.bench.limits import Machine, limit_of
from kvtool.lab.bench.passes import PLAIN, Facts, Sample
from kvtool.lab.bench.prompts import BenchPrompt

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class FusionRow:
    """One mode at one context; times are medians over the rounds, each part by itself.

    Attributes
    ----------
    speedup : full_ms / ttft_ms.
    full_ms, reference : the faster of `transformers`' own prefill and kvtool's mode `full`, and which that was; where
        neither was measured, None and "", and so are `speedup` and `efficiency`.
    flops_ratio, efficiency : full FLOPs / this mode's FLOPs; speedup / flops_ratio.
    load_ms : read + decode + upload + rotate, in the loader's thread; compute_ms : all else but waiting for it,
        `select_ms` (the question's own pass included) and `shift_ms` being parts.
    shift_cost_ms, shift_cost : ttft_ms less the same without the shift, the median over rounds of both in turn, and
        as a share of the latter's median; None: not measured (`--paired`), or nothing is shifted.
    shift_cost_cpu_ms, shift_cost_cpu : the same of the calling thread's processor time, which other programs change
        less; on a GPU what asking for it took.
    overlap : ttft_ms / max(load_ms, compute_ms): 1 is loading and computing beside each other at no cost.
    limit_ms : the roofline, the larger of `compute_limit_ms` and `load_limit_ms` (limits.py).
    roofline_efficiency : limit_ms / ttft_ms.
    rows_by_layer : computed rows in the main pass, layer by layer, and their sum.
    peak_memory_bytes : on top of the model, the prompt's KV (`kv_bytes`) included; None: unknown.
    staging_bytes : how much of it a pass whose chunks are held in memory already does not take: what loading stages.
    layer_bytes : the KV of one layer of the prompt.
    """

    fusion: str
    context: int
    ttft_ms: float
    speedup: float | None
    flops_ratio: float
    efficiency: float | None
    read_ms: float
    decode_ms: float
    upload_ms: float
    rotate_ms: float
    load_ms: float
    select_ms: float
    shift_ms: float
    shift_cost_ms: float | None
    shift_cost: float | None
    shift_cost_cpu_ms: float | None
    shift_cost_cpu: float | None
    compute_ms: float
    wait_ms: float
    plan_ms: float
    overlap: float
    bytes_read: int
    records_read: int
    records_spared: int
    bytes_spared: int
    rows_by_layer: tuple[int, ...]
    rows_total: int
    flops: int
    full_ms: float | None
    reference: str
    limit_ms: float
    compute_limit_ms: float
    load_limit_ms: float
    roofline_efficiency: float
    peak_memory_bytes: int | None
    staging_bytes: int | None
    kv_bytes: int
    layer_bytes: int


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
        """Which one that is."""
        if self.ms is None:
            return ""
        return PLAIN if self.transformers_ms == self.ms else "kvtool full"


@dataclass(frozen=True, slots=True)
class Measured:
    """A prompt's samples and facts by mode.

    Attributes
    ----------
    unshifted : samples of the same rounds without a shift, of the modes that were measured so.
    """

    prompt: BenchPrompt
    samples: Mapping[str, Sequence[Sample]]
    facts: Mapping[str, Facts]
    unshifted: Mapping[str, Sequence[Sample]] = field(default_factory=dict)

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


class About:
    """What rows are computed with besides their own samples."""

    def __init__(self, architecture: Architecture, machine: Machine, decoder: Decoder) -> None:
        self.architecture, self.machine, self.decoder = architecture, machine, decoder
        self.model_bytes = sum(weight.nbytes for weight in decoder.model.parameters())


def rows_of(measured: Measured, about: About, modes: Sequence[str]) -> Iterator[FusionRow]:
    """A row for each of these modes that was measured."""
    reference = measured.reference
    for mode in (mode for mode in modes if mode in measured.samples):
        without = measured.unshifted.get(mode, ())
        yield _row(mode, (measured.samples[mode], without), measured.facts[mode], reference, about)


def _row(
    mode: str, taken: tuple[Sequence[Sample], Sequence[Sample]], facts: Facts, reference: Reference, about: About
) -> FusionRow:
    """Of samples with and without a shift."""
    samples = taken[0]
    later, busier = (_cost_of_shift(*taken, which) for which in ("ttft_ms", "cpu_ms"))
    ttft = statistics.median(sample.ttft_ms for sample in samples)
    parts = _parts(samples)
    work = flops(about.architecture, facts.passes)
    full = flops(about.architecture, [full_work(reference.context, about.architecture.windows)])
    bytes_each = about.decoder.dtype.itemsize
    kv_bytes = about.decoder.kv_bytes(reference.context)
    limit = limit_of(about.machine, about.architecture, bytes_each, facts.passes, facts.bytes_read)
    speedup = None if reference.ms is None else reference.ms / ttft
    return FusionRow(
        fusion=mode,
        context=reference.context,
        ttft_ms=ttft,
        speedup=speedup,
        flops_ratio=full / work,
        efficiency=None if speedup is None else speedup / (full / work),
        **parts,
        shift_cost_ms=later[0],
        shift_cost=later[1],
        shift_cost_cpu_ms=busier[0],
        shift_cost_cpu=busier[1],
        overlap=ttft / max(parts["load_ms"], parts["compute_ms"]),
        bytes_read=facts.bytes_read,
        records_read=facts.records_read,
        records_spared=facts.records_spared,
        bytes_spared=facts.bytes_spared,
        rows_by_layer=facts.rows,
        rows_total=sum(facts.rows),
        flops=work,
        full_ms=reference.ms,
        reference=reference.name,
        limit_ms=limit.ms,
        compute_limit_ms=limit.compute_ms,
        load_limit_ms=limit.load_ms,
        roofline_efficiency=limit.ms / ttft,
        peak_memory_bytes=facts.peak_bytes,
        staging_bytes=_staging_bytes(facts),
        kv_bytes=kv_bytes,
        layer_bytes=kv_bytes // len(about.architecture.layers),
    )


def _cost_of_shift(
    samples: Sequence[Sample], unshifted: Sequence[Sample], which: str
) -> tuple[float, float] | tuple[None, None]:
    """What it adds to a time of samples: milliseconds, and as a share; None where none was taken without."""
    if not unshifted:
        return None, None
    moved, plain = ([float(getattr(one, which)) for one in some] for some in (samples, unshifted))
    cost = statistics.median(later - sooner for later, sooner in zip(moved, plain, strict=True))
    return cost, cost / statistics.median(plain)


def _staging_bytes(facts: Facts) -> int | None:
    if facts.peak_bytes is None or facts.held_bytes is None:
        return None
    return max(0, facts.peak_bytes - facts.held_bytes)


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
