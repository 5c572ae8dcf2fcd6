"""Recurrent hybrids: full prefill, generation, and the exact reuse of a prompt's beginning with its states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch

from kvtool.core.cache.tables import Place, StretchInfo
from kvtool.core.errors import DamagedError, ModelError
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.prefix_cache import PrefixFused, StoredPrefix, checkpoint_ends, encode_part, fuse_prefix
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Sampling, first_token, generate
from kvtool.core.model.hf.states import StateAndRowsLayer, StateCache, States
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.session.gate import check_invariants
from tests.codec import test_families
from tests.families import HYBRIDS, tiny_model
from tests.fusion.making import (
    CHUNKS,
    PREFIX,
    QUESTION,
    Case,
    Ids,
    assert_full,
    decoder_of,
    plain_logits,
    plain_text,
    tokens,
)
from tests.wording import refused

EXACT = 1e-4  # of logits that differ by 3, in float32
GOES_ON = tuple(name for name in HYBRIDS if name != "jamba")  # whose forward goes on from a state with several tokens
OTHER: Ids = tokens(31, 77)


@cache
def decoder(name: str) -> Decoder:
    with torch.inference_mode(False):
        return decoder_of(tiny_model(name))


def plan_of(chunks: Sequence[Ids] = CHUNKS, question: Ids = QUESTION, prefix: Ids = PREFIX) -> Plan:
    ids = [Candidate(chunk, bytes([number]) * 20) for number, chunk in enumerate(chunks)]
    return build_plan(Candidate(prefix), ids, question)


@dataclass
class Shelf:
    infos: dict[bytes, StretchInfo] = field(default_factory=dict)
    parts: dict[tuple[bytes, Place], bytes] = field(default_factory=dict)
    read_of: list[tuple[bytes, Place]] = field(default_factory=list)

    def found(self, plan: Plan) -> StoredPrefix:
        before: tuple[int, ...] = ()
        names = []
        for segment in plan.segments[:-1]:
            before += segment.ids
            names.append(repr(before).encode())
        return StoredPrefix(tuple(names), tuple(self.infos.get(name) for name in names))

    def read(self, stretch: bytes, place: Place) -> memoryview:
        self.read_of.append((stretch, place))
        return memoryview(bytearray(self.parts[stretch, place]))

    def answer(self, model: str, plan: Plan, read: Callable[[bytes, Place], memoryview] | None = None) -> PrefixFused:
        done = fuse_prefix(decoder(model), plan, Prefix(), self.found(plan), read or self.read, reserve=40)
        self.keep(done)
        return done

    def keep(self, done: PrefixFused) -> None:
        for one in done.new:
            self.infos[one.id] = one.info
            self.parts |= {(one.id, place): encode_part(tensors) for place, tensors in one.parts.items()}


def off(chained: PrefixFused, name: str) -> float:
    plan = chained.fused.plan
    return float((chained.fused.logits - plain_logits(name, "float32", tuple(plan.ids), "sdpa")).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_full_is_what_transformers_gives(name: str) -> None:
    plan = plan_of()
    made = fuse_prefix(decoder(name), plan, Full(), StoredPrefix((), ()), Shelf().read, reserve=40)
    assert off(made, name) <= EXACT
    assert not made.new
    assert made.fused.tokens.fresh == plan.length
    logits = made.fused.logits
    said = generate(decoder(name), made.fused.cache, first_token(logits, Sampling.greedy(1)), Sampling.greedy(32))
    assert said.ids == plain_text(name, "float32", tuple(plan.ids), 32)


@pytest.mark.parametrize("name", GOES_ON)
def test_behind_a_stored_beginning_it_says_the_same(name: str) -> None:
    shelf = Shelf()
    first = shelf.answer(name, plan_of())
    assert off(first, name) <= EXACT
    second = shelf.answer(name, plan_of(question=OTHER))
    assert off(second, name) <= EXACT
    assert second.fused.tokens.fresh == len(OTHER)  # nothing else was computed
    assert second.fused.tokens.reused == first.fused.plan.length - len(QUESTION)
    assert not second.new
    said = generate(
        decoder(name), second.fused.cache, first_token(second.fused.logits, Sampling.greedy(1)), Sampling.greedy(32)
    )
    assert said.ids == plain_text(name, "float32", tuple(second.fused.plan.ids), 32)


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "nemotron-h", "lfm2"])
@pytest.mark.parametrize(
    ("chunks", "reused"),
    [
        (CHUNKS[:2], 3),  # fewer chunks
        ((*CHUNKS, OTHER), 5),  # one more
        ((*CHUNKS[:3], OTHER), 4),  # another at the end
        ((CHUNKS[0], CHUNKS[1], OTHER, CHUNKS[3]), 3),
        ((OTHER, *CHUNKS[1:]), 1),  # another at the beginning: the prompt's own beginning is left
        ((CHUNKS[1], CHUNKS[0], *CHUNKS[2:]), 1),  # another order
    ],
)
def test_as_much_is_reused_as_is_the_same(name: str, chunks: tuple[Ids, ...], reused: int) -> None:
    shelf = Shelf()
    shelf.answer(name, plan_of())
    again = shelf.answer(name, plan_of(chunks, OTHER))
    assert off(again, name) <= EXACT
    statuses = [segment.status for segment in again.fused.plan.segments]
    assert statuses == ["exact"] * reused + ["miss"] * (len(chunks) + 1 - reused) + ["fresh"]
    assert again.fused.tokens.fresh == sum(len(one.ids) for one in again.fused.plan.segments[reused:])


def test_what_was_answered_stays_reusable() -> None:
    shelf = Shelf()
    shelf.answer("lfm2", plan_of())  # keeps states at its ends 0, 2, 3 and 4
    shorter = shelf.answer("lfm2", plan_of(CHUNKS[:1]))
    assert [one.number for one in shorter.new] == [1]  # now with the state after it
    del shelf.infos[shelf.found(plan_of()).ids[2]]  # dropped for others
    longer = shelf.answer("lfm2", plan_of((*CHUNKS, *CHUNKS, OTHER)))
    assert [one.number for one in longer.new] == [2, 5, 6, 7, 8, 9]  # 3 and 4 are there, with more than is new of them
    assert shelf.infos[shelf.found(plan_of()).ids[3]].states
    assert off(shelf.answer("lfm2", plan_of(CHUNKS[:3], OTHER)), "lfm2") <= EXACT


def test_without_a_prefix_and_without_chunks() -> None:
    for chunks, prefix in ((CHUNKS, ()), ((), PREFIX), (CHUNKS[:1], ())):
        shelf = Shelf()
        shelf.answer("lfm2", plan_of(chunks, prefix=prefix))
        again = shelf.answer("lfm2", plan_of(chunks, OTHER, prefix))
        assert off(again, "lfm2") <= EXACT
        assert again.fused.tokens.fresh == len(OTHER)


def test_only_the_last_states_are_read() -> None:
    shelf = Shelf()
    shelf.answer("qwen3-next", plan_of())
    shelf.read_of.clear()
    again = shelf.answer("qwen3-next", plan_of(question=OTHER))
    last = shelf.found(plan_of()).ids[-1]
    assert {stretch for stretch, (side, _) in shelf.read_of if side == "state"} == {last}
    assert again.fused.bytes_read == sum(len(shelf.parts[one]) for one in shelf.read_of)


@pytest.mark.parametrize("side", ["rows", "state"])
def test_a_damaged_part_is_computed_again(side: str) -> None:
    shelf, name = Shelf(), "falcon-h1"
    shelf.answer(name, plan_of())
    damaged = shelf.found(plan_of()).ids[3]

    def read(stretch: bytes, place: Place) -> memoryview:
        if stretch == damaged and place[0] == side:
            raise DamagedError("flipped")
        return shelf.read(stretch, place)

    again = shelf.answer(name, plan_of(CHUNKS[:3], OTHER), read)
    assert off(again, name) <= EXACT
    assert again.fused.plan.segments[3].reason == "damaged"
    assert [one.id for one in again.new] == [damaged]


def test_a_state_that_is_no_number_is_computed_again() -> None:
    """Whatever the cause: nothing after it would be a number, and the answer an error."""
    shelf, name = Shelf(), "qwen3.5"
    shelf.answer(name, plan_of())
    last = shelf.found(plan_of()).ids[-1]
    broken = {f"{what} {at}": torch.full_like(one, torch.nan) for (what, at), one in states_of(name)[0].items()}
    shelf.parts[last, ("state", 0)] = encode_part(broken)
    again = shelf.answer(name, plan_of(question=OTHER))
    assert off(again, name) <= EXACT
    assert [one.id for one in again.new] == [last]
    assert again.fused.plan.segments[len(CHUNKS)].reason == "damaged"
    assert shelf.answer(name, plan_of(question=OTHER)).fused.tokens.fresh == len(OTHER)


def states_of(name: str) -> list[States]:
    _, cache = decoder(name).prefill(CHUNKS[1])
    assert isinstance(cache, StateCache)
    return [layer.states() for layer in cache.state_layers]


@pytest.mark.parametrize(
    "change",
    [
        lambda info: replace(info, tokens=info.tokens + 1),
        lambda info: replace(info, rows=()),
        lambda info: replace(info, states=info.states[1:]),
    ],
)
def test_a_stretch_of_another_model_is_not_taken(change: Callable[[StretchInfo], StretchInfo]) -> None:
    shelf = Shelf()
    shelf.answer("qwen3.5", plan_of())
    last = shelf.found(plan_of()).ids[-1]
    shelf.infos[last] = change(shelf.infos[last])
    again = shelf.answer("qwen3.5", plan_of(question=OTHER))
    assert off(again, "qwen3.5") <= EXACT
    assert again.fused.tokens.fresh > len(OTHER)


def test_states_are_kept_at_few_ends() -> None:
    assert checkpoint_ends(1) == {0}
    assert checkpoint_ends(5) == {0, 2, 3, 4}
    assert checkpoint_ends(100) == {0, 35, 67, 83, 91, 95, 97, 98, 99}
    for segments in range(1, 200):
        ends = sorted(checkpoint_ends(segments))
        for same in range(1, segments):  # a prompt that is the same in so many segments
            begun = max(end + 1 for end in ends if end < same)
            assert segments - begun <= 2 * (segments - same)


def test_a_state_cannot_go_back() -> None:
    made = Shelf().answer("lfm2", plan_of())
    fused = made.fused
    model = decoder("lfm2")
    model.extend([7, 8, 9], fused.cache)
    with refused(ModelError):
        fused.cache.set_length(fused.plan.length + 1)
    fused.cache.set_length(fused.plan.length)  # where it was marked
    first = model.extend([7], fused.cache)
    fused.cache.set_length(fused.plan.length)
    assert torch.equal(first, model.extend([7], fused.cache))


@pytest.mark.parametrize("name", HYBRIDS)
def test_in_bfloat16_it_is_as_far_off_as_transformers(name: str) -> None:
    """Of full prefill; and after a stored beginning, where the model can continue from one."""
    with torch.inference_mode(False):
        rounded = Case(name, "bfloat16", decoder_of(tiny_model(name, "bfloat16")))
    shelf, plan = Shelf(), plan_of()
    made = fuse_prefix(rounded.decoder, plan, Full(), StoredPrefix((), ()), shelf.read)
    assert_full(rounded, plan.ids, made.fused.logits)
    for reused in (0, plan.length - len(QUESTION))[: 2 * (name in GOES_ON)]:
        done = fuse_prefix(rounded.decoder, plan, Prefix(), shelf.found(plan), shelf.read)
        shelf.keep(done)
        assert_full(rounded, plan.ids, done.fused.logits)
        assert done.fused.tokens.reused == reused


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_level_is_within_the_error_that_it_states(name: str) -> None:
    """Of the rows that its layers of attention keep: a store has those of chunks in exact records today."""
    _, cache = decoder(name).prefill(CHUNKS[1])
    rows = [layer.view() for layer in cache.buffers if isinstance(layer, BufferLayer | StateAndRowsLayer)]
    assert rows
    for level in test_families.LEVELS:
        test_families.holds([(keys[0], values[0]) for keys, values in rows], level)


@pytest.mark.slow
def test_the_gate_tells_which_models_go_on_from_a_state() -> None:
    for name in ("granite4", "jamba"):
        verdict = check_invariants(decoder(name), "tiny", PREFIX, CHUNKS)
        assert [check.law for check in verdict.checks] == [3]
        assert verdict.passed == (name in GOES_ON)
    for name in ("qwen3-next", "falcon-h1"):
        with torch.inference_mode(False):
            rounded = decoder_of(tiny_model(name, "bfloat16"))
        assert check_invariants(rounded, "tiny", PREFIX, CHUNKS).passed
