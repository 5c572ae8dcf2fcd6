"""The fused pass on a GPU that is not there: nothing on the wrong side, no race between streams, few waits; and what
crosses when a layer is placed, and how often."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion import loader
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.loader import LayerMemory
from kvtool.core.fusion.plan import Part, Plan, Segment, build_plan
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.source import ChunkCache, KVSource, ReadStats, StoreSource, held_on
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.rope import Rotary
from tests.families import tiny_model
from tests.fusion.launching import Kernel, Records, held_on_gpu, logits_on_cpu, on_gpu
from tests.fusion.making import BOS, CHUNKS, DTYPES, Case, SpySource, assert_full, decoder_of, distance, needed, on_cpu
from tests.pretended.streams import Log
from tests.spying import calls_of

# Times that the CPU waits for the device in one pass of 4 layers, besides that for its end: all else is queued ahead.
WAITS = {"infoflow": 1, "union": 1, "blend": 3}


def logits_of(own: Case, selector: Selector, source: KVSource | None = None) -> torch.Tensor:
    return own.fuse(own.plan(lead_in=BOS), selector, source).logits.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_the_cpu_gives(gpu: Log, family: str, name: str) -> None:
    wanted = logits_on_cpu(family, SELECTORS[name]())
    own = on_gpu(family)
    plan = own.plan(lead_in=BOS)
    gpu.waits.clear()
    fused = own.fuse(plan, SELECTORS[name]())
    assert len(gpu.waits) <= 1 + WAITS.get(name, 0), gpu.lines()
    assert distance(fused.logits, wanted) <= 1e-4


class Elsewhere(KVSource):
    def __init__(self, inner: KVSource) -> None:
        self.inner = inner

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        return [(keys.clone(), values.clone()) for keys, values in self.inner.read(segments, layer, stats)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["youtu", "gemma4-shared"])
def test_sides_of_other_shapes(gpu: Log, family: str) -> None:
    """Latents, and heads that differ from layer to layer, from pinned memory and from any other."""
    own = on_gpu(family)
    wanted = logits_on_cpu(family, Epic())
    assert distance(logits_of(own, Epic()), wanted) <= 1e-4
    assert distance(logits_of(own, Epic(), Elsewhere(own.source)), wanted) <= 1e-4


def _nothing(*ignored: object) -> None: ...


def _no_wait_for_layers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.pretended.streams.Event.wait", _nothing)


def _no_wait_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.pretended.streams.Event.synchronize", _nothing)
    patch.setattr(loader, "default_workers", lambda: 1)  # else each places too few layers to use its memory again


def _table_in_another_stream(patch: pytest.MonkeyPatch) -> None:
    table = Rotary.table

    def elsewhere(self: Rotary, positions: torch.Tensor) -> RopeTables:
        with torch.cuda.stream(torch.cuda.Stream()):
            return table(self, positions)

    patch.setattr(Rotary, "table", elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [_no_wait_for_layers, _no_wait_for_the_copy, _table_in_another_stream])
def test_a_race_shows(gpu: Log, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    wanted = logits_on_cpu("llama", Epic())
    own = on_gpu("llama")
    plan = own.plan(lead_in=BOS)
    broken(monkeypatch)
    fused = fuse(own.decoder, plan, Epic(), own.source)
    assert not distance(fused.logits, wanted) <= 1e-4


LAYERS = 4


def sources(own: Case) -> dict[str, KVSource]:
    return {"memory": own.source, "records": StoreSource(Records(own), own.decoder)}


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs a GPU and triton"
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "phi3", "llama-yarn", "gemma"])
def test_a_real_gpu_places_in_one_launch(family: str) -> None:
    """The kernel passes its trial: otherwise torch's operations would do the work unnoticed."""
    for dtype in DTYPES:
        assert decoder_of(tiny_model(family, dtype), "cuda").rotary.by_kernel


@pytest.mark.some(1)
@pytest.mark.parametrize("source", ["memory", "records"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_one_launch_a_layer_gives_what_the_cpu_gives(kernel: Kernel, family: str, source: str) -> None:
    own, wanted = on_gpu(family), logits_on_cpu(family, Epic())
    plan = own.plan(lead_in=BOS)
    fused = own.fuse(plan, Epic(), sources(own)[source])
    assert distance(fused.logits, wanted) <= 1e-4
    assert len(kernel.launches) == LAYERS
    assert {len(table) for table in kernel.launches} == {len(needed(fused, Epic()))}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("limit", [0, 10**5, 10**9])
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_records_held_are_read_from_where_they_are(
    gpu: Log, monkeypatch: pytest.MonkeyPatch, there: bool, launched: bool, limit: int
) -> None:
    """Some are held, and some are read; then all are held. A record that is released at once is read all the same."""
    if launched:
        Kernel.instead(monkeypatch)
    own = on_gpu("llama")
    spy = SpySource(StoreSource(Records(own), own.decoder))
    hot = ChunkCache(spy, limit, device=held_on(own.decoder) if there else None)
    for chunks in (CHUNKS[:2], CHUNKS, CHUNKS[::-1]):
        wanted = logits_on_cpu("llama", Reuse(), chunks)
        assert distance(own.fuse(own.plan(chunks, lead_in=BOS), Reuse(), hot).logits, wanted) <= 1e-4
    if limit == 10**9:
        assert len(spy.reads) == 2 * LAYERS
        held = [side for layers in hot._held.values() for kv, _ in layers.values() for side in kv]
        assert all(side.is_cuda == there for side in held)


@pytest.mark.slow
def test_what_is_held_on_the_device_does_not_cross_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = calls_of(monkeypatch, LayerMemory, "upload", lambda _, targets: sum(map(len, targets)))
    own = on_gpu("llama")
    hot, plan = held_on_gpu(own), own.plan(lead_in=BOS)
    for _ in range(2):  # the first question brings the records to where they are held
        own.fuse(plan, Reuse(), hot)
    table = 64 * len(plan.cached)
    assert crossed == [table] * LAYERS * 2


@pytest.mark.slow
def test_of_chunks_that_are_held_only_the_wanted_part_is_placed(kernel: Kernel) -> None:
    def cut(case: Case) -> Plan:
        prefix, *chunks, question = case.plan(lead_in=BOS).segments
        some = [replace(one.source, ids=one.ids[3:-2], part=Part(3, len(one.ids) - 2, len(one.ids))) for one in chunks]
        return build_plan(prefix.source, some, question.ids)

    own, cpu = on_gpu("llama"), on_cpu("llama")
    wanted = cpu.fuse(cut(cpu), Reuse()).logits
    hot = held_on_gpu(own)
    for _ in range(2):  # read, then held
        assert distance(own.fuse(cut(own), Reuse(), hot).logits, wanted) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True])
def test_memory_is_used_again_only_when_its_layer_stands(
    gpu: Log, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    if launched:
        Kernel.instead(monkeypatch)
    monkeypatch.setattr(loader, "default_workers", lambda: 1)
    own = on_gpu("llama")
    plan, source = own.plan(lead_in=BOS), StoreSource(Records(own), own.decoder)
    wanted = logits_on_cpu("llama", Reuse())
    assert distance(own.fuse(plan, Reuse(), source).logits, wanted) <= 1e-4
    monkeypatch.setattr("tests.pretended.streams.Event.synchronize", lambda self: None)
    assert not distance(own.fuse(plan, Reuse(), source).logits, wanted) <= 1e-4


@pytest.mark.slow
def test_a_flipped_bit_is_found_where_it_stands(kernel: Kernel) -> None:
    def flip(data: bytearray, layer: int) -> None:
        if layer == 2:
            data[100] ^= 1

    own = on_gpu("llama")
    plan = own.plan(lead_in=BOS)
    fused = own.fuse(plan, Reuse(), StoreSource(Records(own, flip), own.decoder))
    assert {segment.status for segment in fused.plan.segments[:-1]} == {"miss"}
    assert_full(own, plan.ids, fused.logits)


@pytest.mark.slow
def test_a_layer_of_several_pieces_of_pinned_memory(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_MOST", 5000)
    monkeypatch.setattr(loader, "_LEAST", 64)
    own = on_gpu("llama")
    wanted = logits_on_cpu("llama", Reuse())
    fused = own.fuse(own.plan(lead_in=BOS), Reuse(), StoreSource(Records(own), own.decoder))
    assert distance(fused.logits, wanted) <= 1e-4
