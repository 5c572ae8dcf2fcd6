"""Passes that are replayed, on a GPU that is not there: what the CPU gives, by few operations of the host."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtool.core.common.types import Ids
from kvtool.core.fusion.engine import Fused, fuse_into
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.model.captured import CapturedWork, memory_of
from tests.fusion.launching import Kernel, held_on_gpu, on_gpu
from tests.fusion.making import BOS, CHUNKS, QUESTION, distance, on_cpu
from tests.pretended import OnDevice
from tests.pretended.streams import Log

REPLAYED = ("reuse", "epic", "infoflow", "union")


class Held:
    """A model on the device, which holds all its chunks, and the memory of one prompt after the other."""

    def __init__(self, family: str) -> None:
        self.case = on_gpu(family)
        self.source = held_on_gpu(self.case)
        self.case.fuse(self.case.plan(lead_in=BOS), SELECTORS["reuse"](), self.source)
        self.cache = self.case.decoder.new_cache(1)

    def fused(self, chunks: Sequence[Ids], mode: str, question: Ids = QUESTION, holes: Sequence[int] = ()) -> Fused:
        plan = self.case.plan(chunks, lead_in=BOS, question=question, holes=holes)
        return fuse_into(self.cache, self.case.decoder, plan, SELECTORS[mode](), self.source)

    @property
    def works(self) -> list[CapturedWork[Any]]:
        return [static.captured for static in self.case.decoder.captured._known.values()]


def by_cpu(family: str, chunks: Sequence[Ids], mode: str, question: Ids = QUESTION, holes: Sequence[int] = ()) -> Fused:
    case = on_cpu(family)
    return case.fuse(case.plan(chunks, lead_in=BOS, question=question, holes=holes), SELECTORS[mode]())


def prompts() -> Iterator[tuple[list[Ids], Ids]]:
    """Chunks in another order each time, once fewer of them, with other questions."""
    dice = random.Random(1)
    for fewer in (0, 0, 0, 1, 0):
        yield dice.sample([*CHUNKS], len(CHUNKS) - fewer), QUESTION[: len(QUESTION) - fewer]


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", REPLAYED)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "smollm3"])
def test_every_prompt_gives_what_the_cpu_gives(kernel: Kernel, family: str, mode: str) -> None:
    """The first is computed as it is, the second captured, the others replayed with other rows, shifts and lengths."""
    held, both = Held(family), []
    for chunks, question in prompts():
        fused, wanted = held.fused(chunks, mode, question), by_cpu(family, chunks, mode, question)
        both.append((fused, wanted))
        assert distance(fused.logits, wanted.logits) <= 1e-4
        assert fused.tokens == wanted.tokens
        assert torch.equal(fused.recomputed, wanted.recomputed)
        assert torch.equal(fused.shifted.rows, wanted.shifted.rows)
        for ours, theirs in zip(held.cache.buffers, wanted.cache.buffers, strict=True):
            assert distance(ours.view()[0], theirs.view()[0]) <= 1e-4
            assert distance(ours.view()[1], theirs.view()[1]) <= 1e-4
    for fused, wanted in both:  # also of those before the last
        for moved, right in zip(fused.shifted.by_layer[1:], wanted.shifted.by_layer[1:], strict=True):  # layer 0: noise
            assert moved.mean_squares() == pytest.approx(right.mean_squares(), rel=1e-3)
    assert any(work._replay for work in held.works)
    assert not any(work.why for work in held.works)


def test_a_hole_is_computed_before_the_question_is_asked(kernel: Kernel) -> None:
    held = Held("llama")
    for _ in range(3):
        fused = held.fused(CHUNKS, "union", holes=(1,))
        wanted = by_cpu("llama", CHUNKS, "union", holes=(1,))
        assert distance(fused.logits, wanted.logits) <= 1e-4
        assert torch.equal(fused.recomputed, wanted.recomputed)


class OfTheHost(TorchDispatchMode):
    """Counts the operations on tensors of the device; what a replay does is on those that are inside of them."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(one, OnDevice) for one in tree_leaves((args, kwargs)))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "waits"), [("reuse", 1), ("epic", 1), ("union", 2)])
def test_a_replay_takes_few_operations_of_the_host(kernel: Kernel, gpu: Log, mode: str, waits: int) -> None:
    """Nearly none that grow with the number of layers, and no more waits than before."""
    held, counts = Held("llama"), []
    for _ in range(4):
        gpu.waits.clear()
        with OfTheHost() as host:
            held.fused(CHUNKS, mode)
        counts.append(host.count)
        assert len(gpu.waits) <= waits, gpu.lines()
    assert counts[3] == counts[2]
    assert counts[3] <= counts[0] / 8, counts


def test_other_memory_is_other_work(kernel: Kernel) -> None:
    held, wanted = Held("llama"), by_cpu("llama", CHUNKS, "epic")
    caches = [held.cache, held.case.decoder.new_cache(1)]
    for number in range(6):
        held.cache = caches[number % 2]
        assert distance(held.fused(CHUNKS, "epic").logits, wanted.logits) <= 1e-4
    assert len(held.works) == 2
    held.cache.reserve(held.cache.buffers[0].keys.shape[2] + 1)
    assert distance(held.fused(CHUNKS, "epic").logits, wanted.logits) <= 1e-4
    assert len(held.works) == 3


def test_rows_after_a_shorter_prompt_are_not_shifted(kernel: Kernel) -> None:
    """They had been reused rows of a longer one; shifted again and again they would grow."""
    shorter = [*CHUNKS[:-1], CHUNKS[-1][:-9]]
    held, wanted = Held("llama"), by_cpu("llama", shorter, "epic")
    held.fused(shorter, "epic")  # is read
    for _ in range(2):
        held.fused(CHUNKS, "epic")
    after = [side[:, :, wanted.plan.length :].cpu().clone() for side in memory_of(held.cache)]
    assert distance(held.fused(shorter, "epic").logits, wanted.logits) <= 1e-4
    for side, rows in zip(memory_of(held.cache), after, strict=True):
        assert torch.equal(side[:, :, wanted.plan.length :].cpu(), rows)
    assert len([one for one in held.case.decoder.captured._known.values() if hasattr(one, "probes")]) == 1


def test_what_cannot_be_captured_is_done_as_it_is(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=RuntimeError("CUDA error: operation not permitted"))
    monkeypatch.setattr("tests.pretended.streams.Graph.capture_begin", refuse)
    held, wanted = Held("llama"), by_cpu("llama", CHUNKS, "epic")
    for _ in range(3):
        assert distance(held.fused(CHUNKS, "epic").logits, wanted.logits) <= 1e-4
    assert [work.why for work in held.works] == ["no CUDA graph: CUDA error: operation not permitted"]
