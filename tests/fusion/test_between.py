"""A pass that stops before every layer for a token of another answer gives the same bits, and so does that answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import AnswerSequence, ContinuousBatch, Generated, Sampling, first_token, generate
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from tests.fusion.making import CHUNKS, NAMES, PREFIX, Case, Ids, case, new_case, same_bits, tokens
from tests.fusion.test_prefix_cache import Shelf, decoder, plan_of

OTHERS: tuple[Ids, ...] = (tokens(40, 90), tokens(9, 91))
SEVERAL = ("bamba", "falcon-h1", "lfm2", "qwen3.5")
LONG = Sampling.greedy(24)
# Modes that narrow rows on the way, that ask for the question's attention first, and the rest.
MODES = tuple(name for name in SELECTORS if name != "prefix")


@dataclass
class Beside:
    decoder: Decoder
    together: ContinuousBatch = field(default_factory=ContinuousBatch)
    sequences: list[AnswerSequence] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        for ids in OTHERS:
            logits, cache = self.decoder.prefill(ids, reserve=LONG.options.max_tokens)
            self.sequences.append(AnswerSequence(self.decoder, cache, [first_token(logits, LONG)], LONG))
            self.together.add(self.sequences[-1])

    def step(self) -> None:
        self.steps += 1
        self.together.step()

    def said(self) -> list[Ids]:
        while self.together.sequences:
            self.together.step()
        return [sequence.end().ids for sequence in self.sequences]


def alone(one: Decoder) -> list[Ids]:
    found: list[Generated] = []
    for ids in OTHERS:
        logits, cache = one.prefill(ids, reserve=LONG.options.max_tokens)
        found.append(generate(one, cache, first_token(logits, LONG), LONG))
    return [each.ids for each in found]


def check_fuse(one: Case, mode: str) -> None:
    plan, selector = one.plan(holes=[1]), SELECTORS[mode]()
    expected, beside = one.fuse(plan, selector), Beside(one.decoder)
    with beside.decoder.pausing(beside.step):
        found = one.fuse(plan, selector)
    assert same_bits(expected, found)
    assert found.tokens == expected.tokens
    assert beside.steps >= len(one.decoder.layers)
    assert beside.said() == alone(one.decoder)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode(mode: str) -> None:
    check_fuse(case("llama"), mode)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])
def test_each_family(name: str) -> None:
    check_fuse(case(name), "blend")


def test_models_own_forward_beside_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by the model's own forward pass the same layers as the pass that they interrupt."""
    monkeypatch.setenv("KVTOOL_STEPPER", "torch")
    check_fuse(new_case("qwen3"), "blend")


@pytest.mark.some(1)
@pytest.mark.parametrize("name", SEVERAL)
def test_models_that_keep_states(name: str) -> None:
    plan, one = plan_of(), decoder(name)
    expected = Shelf().answer(name, plan).fused
    beside = Beside(one)
    with beside.decoder.pausing(beside.step):
        found = Shelf().answer(name, plan).fused
    assert torch.equal(expected.logits, found.logits)
    assert beside.steps >= len(one.layers)
    assert beside.said() == alone(one)


def test_chunks_that_are_made_meanwhile() -> None:
    one = case("llama").decoder
    items, lead_in = [PrefillItem(CHUNKS[0]), PrefillItem(CHUNKS[1])], LeadIn(one, PREFIX)
    expected, beside = prefill_chunks(one, lead_in, items), Beside(one)
    with beside.decoder.pausing(beside.step):
        found = prefill_chunks(one, lead_in, items)
    for a, b in zip(expected, found, strict=True):
        for sides, others in zip(a.layers, b.layers, strict=True):
            assert all(map(torch.equal, sides, others))
    assert beside.steps == len(one.layers)
    assert beside.said() == alone(one)


def test_what_it_raises_ends_the_pass() -> None:
    one, left = case("llama"), KvtoolError("nobody waits")
    count = 0

    def leave() -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise left

    plan = one.plan()
    expected = one.fuse(plan, Full())
    with pytest.raises(KvtoolError) as raised, one.decoder.pausing(leave):
        one.fuse(plan, Full())
    assert raised.value is left
    assert same_bits(expected, one.fuse(plan, Full()))


def test_a_pass_that_is_timed_stops_for_nothing() -> None:
    one, stops = case("llama").decoder, []
    with one.pausing(lambda: stops.append(True)), one.pausing(None):
        one.prefill(tokens(30, 2))
    assert not stops


def test_nothing_stops_a_pass_that_runs_between_layers() -> None:
    one, deep = case("llama").decoder, []

    def inside() -> None:
        deep.append(one.prefill(tokens(12, 1))[0])

    with one.pausing(inside):
        one.prefill(tokens(30, 2))
    assert len(deep) == len(one.layers)
    assert torch.equal(deep[0], deep[-1])
