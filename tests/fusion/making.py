"""Helpers of the tests of fusion: prompts over the tiny models, chunk KVs kept in memory, sources that misbehave."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from transformers import DynamicCache

from kvtool.core.cache.identity import ids_digest
from kvtool.core.checkpoint.load import Loaded
from kvtool.core.checkpoint.support import text_config
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Candidate, Plan, Segment, build_plan
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import KVSource, MemorySource, ReadStats, RecordMissing
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Sampling
from kvtool.core.model.options import SamplingOptions
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from tests.families import KINDS, VOCAB, tiny_model, tiny_tokenizer
from tests.more_families import ROUTED

torch.set_num_threads(1)  # tiny matrices are fastest so, and workers of pytest-xdist do not fight for cores

DEVICE = os.environ.get("KVTOOL_TEST_DEVICE", "cpu")  # of what is tested; references stay on the CPU
DTYPES = ("float32", "bfloat16")
NAMES = tuple(KINDS)
# Which rows meet in an expert's product depends on all rows of the pass.
MOE = (
    "mixtral",
    "qwen3-moe",
    "deepseek-v2",
    "deepseek-v3",
    "glm4-moe-lite",
    "gpt-oss",
    "qwen3-vl-moe",
    "glm4v-moe",
    "llama4",
    "kimi-k2.5",
    *("qwen3-next", "qwen3.5-moe", "lfm2-moe", "granite4", "nemotron-h", "kimi-linear", "jamba"),
    *ROUTED,
)
Ids = tuple[int, ...]


def tokens(count: int, seed: int) -> Ids:
    """Ordinary token ids: BOS, EOS and the role marks stay out."""
    chosen = random.Random(seed)
    return tuple(chosen.randrange(5, VOCAB) for _ in range(count))


PREFIX: Ids = (0, *tokens(8, 1))
BOS: Ids = (0,)
CHUNKS: tuple[Ids, ...] = (tokens(23, 2), tokens(71, 3), tokens(1, 4), tokens(40, 5))
QUESTION: Ids = tokens(7, 6)


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


def decoder_of(model: Any, device: str = DEVICE) -> Decoder:
    dtype = str(model.dtype).removeprefix("torch.")
    files: Any = None
    return Decoder(Loaded(model.to(device), tokenizer(), files, device, dtype, "tiny", 0.0))


@cache
def plain_model(name: str, dtype: str, attention: str = "eager") -> Any:
    """Return the same tiny model as `transformers` runs it without kvtool, built outside a caller's inference mode."""
    with torch.inference_mode(False):
        model = tiny_model(name, dtype)
    if name == "llama4":  # its wrapper of images, in transformers 5.24, fails without one
        model = model.language_model
    model.set_attn_implementation(attention)
    return model


@cache
def exact_logits(name: str, dtype: str, ids: Ids) -> torch.Tensor:
    """What `plain_logits` would be without rounding: the same (rounded) weights, computed in float32."""
    model = tiny_model(name, dtype)
    for weight in model.parameters():
        weight.data = weight.data.float()
    model.config.dtype = torch.float32
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@cache
def plain_logits(name: str, dtype: str, ids: Ids, attention: str = "eager") -> torch.Tensor:
    """Logits of the last token, float32 `[vocabulary]`, by unmodified `transformers`."""
    with torch.inference_mode():
        return plain_model(name, dtype, attention)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()


_texts: dict[tuple[str, str, Ids], tuple[int, Ids]] = {}  # the longest answers so far, and how long they might be


def plain_text(name: str, dtype: str, ids: Ids, count: int) -> Ids:
    """The greedy continuation by unmodified `transformers`, end token excluded."""
    if _texts.get((name, dtype, ids), (0, ()))[0] < count:
        prompt = torch.tensor([ids])
        out = plain_model(name, dtype).generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count
        )
        _texts[name, dtype, ids] = count, tuple(token for token in out[0, len(ids) :].tolist() if token != 1)
    return _texts[name, dtype, ids][1][:count]


def plain_rows(name: str, dtype: str, ids: Ids, first: int, start: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of rows from place `first` on by unmodified `transformers`; positions begin at `start`. A cache
    of latents holds these as keys, and rotary keys as values."""
    cache = DynamicCache()
    with torch.inference_mode():
        plain_model(name, dtype)(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(start, start + len(ids))[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            past_key_values=cache,
        )
    sides = [(layer.keys[:, :, first:], layer.values[:, :, first:]) for layer in cache.layers]
    return [swapped(plain_model(name, dtype), *pair) for pair in sides]


def swapped(model: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (values, keys) if hasattr(text_config(model.config), "kv_lora_rank") else (keys, values)


def sensitivity_of(ids: Ids) -> bytes:
    chosen = random.Random(str(ids))
    return torch.tensor([chosen.uniform(0.1, 4) for _ in ids]).half().numpy().tobytes()


@dataclass
class Case:
    """A tiny model and the chunk KVs it has been asked for so far."""

    name: str
    dtype: str
    decoder: Decoder
    kept: dict[bytes, ChunkKV] = field(default_factory=dict)

    def candidate(self, ids: Ids, lead_in: Ids) -> Candidate:
        """Return a stored chunk: prefilled after `lead_in` when it is first asked for."""
        key = ids_digest(lead_in) + ids_digest(ids)
        if key not in self.kept:
            (self.kept[key],) = prefill_chunks(self.decoder, LeadIn(self.decoder, lead_in), [PrefillItem(ids)])
        return Candidate(ids, key, ids_digest(lead_in), "raw", sensitivity=sensitivity_of(ids))

    def plan(
        self,
        chunks: Sequence[Ids] = CHUNKS,
        *,
        lead_in: Ids = PREFIX,
        question: Ids = QUESTION,
        holes: Sequence[int] = (),
        prefix: Ids = PREFIX,
    ) -> Plan:
        wanted = [
            Candidate(ids, reason="not stored") if index in holes else self.candidate(ids, lead_in)
            for index, ids in enumerate(chunks)
        ]
        return build_plan(self.candidate(prefix, ()), wanted, question)

    def fuse(
        self,
        plan: Plan,
        selector: Selector,
        source: KVSource | None = None,
        reserve: int = 0,
        patience: float | None = None,
    ) -> Fused:
        return fuse(self.decoder, plan, selector, source or self.source, reserve, patience=patience)

    @property
    def source(self) -> MemorySource:
        return MemorySource(self.kept)


def new_case(name: str, dtype: str = "float32") -> Case:
    return Case(name, dtype, decoder_of(tiny_model(name, dtype)))


case = cache(new_case)  # shared by tests that leave it whole


@cache
def on_cpu(name: str) -> Case:
    return Case(name, "float32", decoder_of(tiny_model(name), "cpu"))


# What "recompute everything" and "recompute nothing" mean is read off a selector's parameters, so that a new selector
# is tested by being registered.
_EVERYTHING: dict[str, Any] = {"ratio": 1.0, "link_tokens": 10_000}
_NOTHING: dict[str, Any] = {"ratio": 0.0, "link_tokens": 0}
_WITHOUT_PARAMETERS = {"full": "lossless", "prefix": "lossless", "reuse": "reuse"}


def _at(name: str, values: dict[str, Any], kind: str) -> Selector | None:
    given = {item.name: values[item.name] for item in fields(SELECTORS[name]) if item.name in values}
    if given:
        return SELECTORS[name](**given)
    assert name in _WITHOUT_PARAMETERS, f"say in tests/fusion/making.py what the parameters of {name} come to"
    return SELECTORS[name]() if _WITHOUT_PARAMETERS[name] == kind else None


# Selectors where they recompute all that differs from full prefill, and where they recompute nothing, by name.
LOSSLESS = {name: selector for name in SELECTORS if (selector := _at(name, _EVERYTHING, "lossless"))}
IDLE = {name: selector for name in SELECTORS if (selector := _at(name, _NOTHING, "reuse"))}


def variants(selector: Selector) -> list[Selector]:
    """The selector with every value of every parameter that is a choice of words (`link`, `metric`)."""
    changed: Any = selector
    return [
        replace(changed, **{parameter: value})
        for parameter, kind in get_type_hints(type(selector)).items()
        if get_origin(kind) is Literal
        for value in get_args(kind)
    ]


@dataclass(frozen=True)
class Fixed(Selector):
    name = "fixed"
    chosen: torch.Tensor

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        return self.chosen


@dataclass
class SpySource(KVSource):
    """Passes reads on; notes (layer, segment starts), and does `before` each."""

    inner: KVSource
    before: Callable[[Sequence[Segment], int], None] = lambda segments, layer: None
    reads: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[Any]:
        self.reads.append((layer, tuple(segment.start for segment in segments)))
        self.before(segments, layer)
        return self.inner.read(segments, layer, stats)


def needed(fused: Fused, selector: Selector) -> list[Segment]:
    """The cached segments that a pass had to load: not those recomputed whole, unless rows were chosen on the way."""
    if not selector.uses_cache:
        return []
    chosen = bool(selector.narrowing(fused.plan, len(fused.cache.buffers)))
    return [s for s in fused.plan.cached if chosen or not fused.recomputed[s.start : s.stop].all()]


def join_loaders() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("kvtool-loader"):
            thread.join(30)


def missing_at(layer: int, chunk: int) -> Callable[[Sequence[Segment], int], None]:
    """The record of the prompt's segment number `chunk` (0: the prefix) turns out missing at `layer`."""

    def check(segments: Sequence[Segment], at: int) -> None:
        for segment in segments:
            if at == layer and segment.source.ids == (PREFIX, *CHUNKS)[chunk]:
                raise RecordMissing(segment, f"damaged at layer {layer}")

    return check


def assert_full(case: Case, ids: Sequence[int], logits: torch.Tensor) -> None:
    """`logits` are what unmodified `transformers` gives for the whole prompt.

    float32: a difference of 1e-4 at most (measured: 1.3e-5; logits have a standard deviation of about 3).
    bfloat16: the root mean square error against the same weights computed in float32 is at most twice that of plain
    `transformers` (the larger of eager and sdpa). Measured: 0.02 to 0.1 for plain, 0.4 to 1.4 times that for kvtool; a
    mixture of experts, where a rounded router score chooses another expert, up to 2.5 times. A broken engine: 0.5 and
    more.
    """
    prompt, logits = tuple(ids), logits.cpu()
    if case.dtype == "float32":
        assert distance(logits, plain_logits(case.name, case.dtype, prompt)) <= 1e-4
        return
    exact = exact_logits(case.name, case.dtype, prompt)
    ways = ("eager", "sdpa") if plain_model(case.name, case.dtype)._supports_sdpa else ("eager",)
    plain = max(rms(plain_logits(case.name, case.dtype, prompt, how) - exact) for how in ways)
    assert rms(logits - exact) <= (5 if case.name in MOE else 2) * plain


def sampling(**options: Any) -> Sampling:
    return Sampling(SamplingOptions(stop_repeats=False, **options))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; infinite where a number is not finite."""
    worst = float((a.float().cpu() - b.float().cpu()).abs().max())
    return worst if worst == worst else float("inf")


def rms(values: torch.Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def same_bits(a: Fused, b: Fused) -> bool:
    if not torch.equal(a.logits, b.logits):
        return False
    layers = zip(a.cache.buffers, b.cache.buffers, strict=True)
    return all(torch.equal(p, q) for x, y in layers for p, q in zip(x.view(), y.view(), strict=True))
