"""The fused pass on a GPU that is not there: nothing on the wrong side, no race between streams, and few waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion import loader
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.loader import KVSource, ReadStats
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.rope import Rotary
from tests.fusion.launching import logits_on_cpu, on_gpu
from tests.fusion.making import BOS, Case, distance
from tests.pretended.streams import Log

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
