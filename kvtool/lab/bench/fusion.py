"""Time to the first token of every fusion mode, beside full prefill and what the machine could do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.checkpoint.load import resolve_device
from kvtool.core.codec.levels import level_of
from kvtool.core.common.arithmetic import FLOAT32, why_float32
from kvtool.core.common.machine import cores
from kvtool.core.common.progress import Events
from kvtool.core.fusion.selectors import REFERENCE, selector_for
from kvtool.core.kernels.linear.onednn import keep_few_kernels, keep_freed_memory, pack_weights
from kvtool.core.model.decoder import Decoder
from kvtool.lab.bench.flops import Architecture
from kvtool.lab.bench.limits import Machine, measure_machine
from kvtool.lab.bench.machine import Host
from kvtool.lab.bench.passes import INCLUDES, PLAIN, PLAIN_INCLUDES, Answerer, Sample, warm_up
from kvtool.lab.bench.prompts import BenchPrompt, stored_prompts
from kvtool.lab.bench.rows import About, FusionRow, Measured, Reference, rows_of
from kvtool.lab.bench.scratch import Sizes, scratch_store
from kvtool.lab.bench.shapes import PUBLISHED, build_shape, shape_dtype

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session

SEED = 0


@dataclass(frozen=True, slots=True)
class FusionOptions:
    """What to measure; `query` holds the modes' parameters.

    Attributes
    ----------
    skip_full_above : longer prompts are not prefilled in full: attention over all of 32,000 tokens takes minutes, and
        the limits that a mode is measured against need none of it.
    paired : modes that shift reused rows are timed without that, too.
    """

    modes: tuple[str, ...]
    sizes: Sizes
    level: str
    repeat: int
    query: QueryOptions
    skip_full_above: int | None = None
    paired: bool = False

    def measured(self, length: int) -> tuple[str, ...]:
        """The modes of one prompt, full prefill by both first unless that takes too long."""
        if self.skip_full_above is not None and length > self.skip_full_above:
            return tuple(mode for mode in self.modes if mode != REFERENCE)
        return tuple(dict.fromkeys((PLAIN, REFERENCE, *self.modes)))

    def held_against(self) -> tuple[str, ...]:
        """The modes that are timed without their shift as well; where rows are left out nothing is shifted."""
        shifting = self.paired and self.query.shift and level_of(self.level).share == 100
        return tuple(mode for mode in self.modes if shifting and selector_for(self.query, mode).shift)


@dataclass(frozen=True, slots=True)
class FusionBench:
    """All rows, and what they were measured on."""

    model: str
    shape: str | None
    device: str
    dtype: str
    threads: int
    cores: int
    parameters: int
    model_bytes: int
    level: str
    chunk_tokens: int | None  # None: the store's own
    ratio: float
    link_tokens: int
    repeat: int
    seed: int
    host: Host
    machine: Machine
    references: tuple[Reference, ...]
    rows: tuple[FusionRow, ...]
    notes: tuple[str, ...]
    includes: str = INCLUDES
    plain_includes: str = PLAIN_INCLUDES

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `bench fusion`."""
        value = asdict(self)
        return {"resolved": {name: value.pop(name) for name in ("model", "device", "dtype")}} | value


def passes(options: FusionOptions) -> int:
    """How many passes there will be at most: the work of a progress bar."""
    contexts = options.sizes.contexts
    all_modes = sum(len(options.measured(context)) for context in contexts)
    return all_modes * (options.repeat + 1) + len(contexts) * len(options.held_against()) * options.repeat


def bench_shape(name: str, device: str, dtype: str, options: FusionOptions, events: Events) -> FusionBench:
    """Measure a model of a named shape with random weights, over chunks of random tokens in a temporary store.

    Raises
    ------
    UsageError : no such shape, device or mode; a context that is too short, or too long for the model.
    """
    events.status(_making(name, device, dtype))
    loaded = build_shape(name, device, dtype, SEED)
    keep_freed_memory()  # as loading a model does: fresh pages would be a third of a long prefill's time
    keep_few_kernels()
    pack_weights(loaded.model)
    decoder = Decoder(loaded)
    decoder.check_length(max(options.sizes.contexts), "take a shorter --context")

    def told(done: int, total: int) -> None:
        events.status(f"prefill chunks, {done} of {total} tokens")

    with scratch_store(decoder, options.level, options.sizes, SEED, told) as (store, prompts):
        return _bench(decoder, store, prompts, options, events, name)


def _making(name: str, device: str, dtype: str) -> str:
    """What is made, and why it is no bfloat16 where it could be."""
    if dtype != "auto":
        return f"make {name} in {dtype}"
    kind = shape_dtype(resolve_device(device))
    return f"make {name} in {kind}" + (f": {why_float32(PUBLISHED)}" if kind == FLOAT32 else "")


def bench_store(store: Store, session: Session, options: FusionOptions, events: Events) -> FusionBench:
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
) -> FusionBench:
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
    return FusionBench(
        model=shape or decoder.loaded.files.ref,
        shape=shape,
        device=decoder.device,
        dtype=decoder.loaded.dtype,
        threads=torch.get_num_threads(),
        cores=cores(),
        parameters=sum(weight.numel() for weight in decoder.model.parameters()),
        model_bytes=about.model_bytes,
        level=options.level,
        chunk_tokens=options.sizes.chunk_tokens if shape else None,
        ratio=options.query.ratio,
        link_tokens=options.query.link_tokens,
        repeat=options.repeat,
        seed=SEED,
        host=Host.here(),
        machine=machine,
        references=tuple(one.reference for one in measured),
        rows=tuple(row for one in measured for row in rows_of(one, about, options.modes)),
        notes=() if shape else tuple(_shortfalls(prompts, options.level)),
    )


def _shortfalls(prompts: Sequence[BenchPrompt], level: str) -> Iterator[str]:
    """Contexts for which the store has not enough."""
    for prompt in prompts:
        if prompt.holds_all and prompt.length < prompt.wanted:
            yield (
                f"all {len(prompt.chunks)} chunks of the store at level {level} make a prompt of {prompt.length} "
                f"tokens: {prompt.wanted} were asked for"
            )


def _measure(answerer: Answerer, prompt: BenchPrompt, options: FusionOptions, events: Events) -> Measured:
    """Every mode once a round, so that a slow moment of the machine meets all of them; one before for memory."""
    modes, paired = options.measured(prompt.length), options.held_against()
    facts = {}
    for mode in modes:
        events.status(f"{prompt.length} tokens, {mode}")
        facts[mode] = answerer.facts(prompt, mode)
        events.advance(1)
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    unshifted: dict[str, list[Sample]] = {mode: [] for mode in paired}
    for number in range(options.repeat):
        for mode in modes:
            events.status(f"{prompt.length} tokens, {mode}")
            turns = [(samples, True), (unshifted, False)] if mode in paired else [(samples, True)]
            for found, shift in turns[:: -1 if number % 2 else 1]:
                found[mode].append(answerer.sample(prompt, mode, shift))
                events.advance(1)
    return Measured(prompt, samples, facts, unshifted)
