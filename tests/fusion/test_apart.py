"""Chunks of recurrent hybrids, computed apart and put together: against a cache of `transformers` made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtool.core.cache.stretches import Place
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import DamagedError, GateError, ModelError
from kvtool.core.fusion.apart import Stored, fuse_apart
from kvtool.core.fusion.engine import Fused
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.stretch import Found, NewStretch
from kvtool.core.model import alone
from kvtool.core.model.states import CONV
from kvtool.core.records.parts import encode_part
from kvtool.core.session.alone import AloneMaker
from kvtool.core.session.apart_law import check_apart
from kvtool.core.session.identity import LeadInIds, StoreIdentity
from tests.families import HYBRIDS
from tests.fusion.making import CHUNKS, PREFIX, QUESTION, Ids, plain_model, tokens
from tests.fusion.test_chain import EXACT, GOES_ON, decoder, off

WARM: Ids = (*PREFIX, *tokens(30, 21))
SEVERAL = (
    *("qwen3-next", "qwen3.5", "lfm2", "granite4", "bamba", "nemotron-h", "falcon-h1", "olmo-hybrid", "kimi-linear"),
)


def identity(lead_in: Ids) -> StoreIdentity:
    return StoreIdentity(
        *("tiny", "fingerprint", "float32"), PREFIX, (), LeadInIds("warm", lead_in), SplitSettings(), keeps_states=True
    )


@cache
def made(name: str, lead_in: Ids) -> dict[Ids, NewStretch]:
    maker = AloneMaker(identity(lead_in), decoder(name))
    return {PREFIX: maker.beginning(), **{ids: maker.chunk(ids) for ids in CHUNKS}}


def fused(
    name: str, selector: Selector, chunks: Sequence[Ids] = CHUNKS, lead_in: Ids = WARM, broken: Place | None = None
) -> Fused:
    """Over the chunks as a store gives them back; what is `broken` of the second is damaged."""
    stretches = [made(name, lead_in)[ids] for ids in (PREFIX, *chunks)]
    parts = {(one.id, place): encode_part(tensors) for one in stretches for place, tensors in one.parts.items()}

    def read(stretch: bytes, place: Place) -> memoryview:
        if (stretch, place) == (stretches[-1].id, broken):
            raise DamagedError("damaged")
        return memoryview(bytearray(parts[stretch, place]))

    plan = build_plan(Candidate(PREFIX), [Candidate(ids) for ids in chunks], QUESTION)
    found = Found(tuple(one.id for one in stretches), tuple(one.info for one in stretches))
    return fuse_apart(decoder(name), plan, selector, Stored(found, lead_in), read, reserve=8)


# ---- by hand -----------------------------------------------------------------------------------------------------


def plain_pass(name: str, ids: Ids, start: int, held: Any) -> torch.Tensor:
    positions = torch.arange(start, start + len(ids))[None]
    with torch.inference_mode():
        model = plain_model(name, "float32")
        return model(input_ids=torch.tensor([ids]), position_ids=positions, past_key_values=held).logits[0, -1]


def has_states(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def noted(seen: dict[int, Any], number: int) -> Any:
    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen[number] = module, args, kwargs

    return note


@torch.inference_mode()
def by_hand(name: str, chunks: Sequence[Ids]) -> torch.Tensor:
    """The question's logits over chunks that were each computed behind `WARM`, at positions before its own.

    The state behind a chunk is what each layer itself makes of the one before it, given the inputs that it had alone.
    """
    model, config = plain_model(name, "float32"), plain_model(name, "float32").config
    whole = DynamicCache(config=config)
    plain_pass(name, PREFIX, 0, whole)
    at = len(PREFIX)
    for ids in chunks:
        lead: Any = DynamicCache(config=config)
        seen: dict[int, Any] = {}
        plain_pass(name, WARM, at - len(WARM), lead)
        windows = [layer.conv_states[0].clone() if has_states(layer) else None for layer in lead.layers]
        hooks = [
            child.register_forward_pre_hook(noted(seen, number), with_kwargs=True)
            for number, layer in enumerate(model.model.layers)
            for child in layer.children()
            if hasattr(child, "conv1d")
        ]
        plain_pass(name, ids, at, lead)
        for hook in hooks:
            hook.remove()
        for number, (own, there) in enumerate(zip(lead.layers, whole.layers, strict=True)):
            if number in seen:
                before = there.recurrent_states[0].clone()
                module, args, kwargs = seen[number]
                again = DynamicCache(config=config)
                again.layers[number].update_conv_state(windows[number], 0)
                again.layers[number].update_recurrent_state(before, 0)
                put = {key: again if value is lead else value for key, value in kwargs.items()}
                module.forward(*(again if one is lead else one for one in args), **put)
                there.recurrent_states[0].copy_(again.layers[number].recurrent_states[0])
            if has_states(own):
                last = own.conv_states[0][..., -len(ids) :]
                window = torch.cat([there.conv_states[0], last], -1)[..., -own.conv_states[0].shape[-1] :]
                there.conv_states[0].copy_(window)
            if getattr(own, "keys", None) is not None:
                there.update(own.keys[:, :, len(WARM) :], own.values[:, :, len(WARM) :])
        at += len(ids)
    return plain_pass(name, QUESTION, at, whole).float()


@pytest.mark.parametrize("name", SEVERAL)
def test_the_question_sees_what_a_cache_made_by_hand_holds(name: str) -> None:
    done = fused(name, Reuse())
    assert [segment.status for segment in done.plan.segments] == ["exact", *["hit"] * len(CHUNKS), "fresh"]
    assert (done.tokens.reused, done.tokens.fresh) == (done.plan.length - len(QUESTION), len(QUESTION))
    assert float((done.logits - by_hand(name, CHUNKS)).abs().max()) <= EXACT


# ---- laws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOES_ON)
def test_one_chunk_behind_its_lead_in_is_exact(name: str) -> None:
    done = fused(name, Reuse(), CHUNKS[1:2], PREFIX)
    assert [segment.status for segment in done.plan.segments] == ["exact", "exact", "fresh"]
    assert off_full(done, name) <= EXACT


@pytest.mark.parametrize("name", GOES_ON)
def test_all_computed_again_is_full_prefill_and_nothing_is_reuse(name: str) -> None:
    everything = fused(name, Epic(link_tokens=100))
    assert everything.tokens.reused == len(PREFIX)
    assert off_full(everything, name) <= EXACT
    assert torch.equal(fused(name, Epic(link_tokens=0)).logits, fused(name, Reuse()).logits)


def off_full(done: Fused, name: str) -> float:
    from kvtool.core.fusion.chain import Chained

    return off(Chained(done, (), ()), name)


@pytest.mark.parametrize("name", ["qwen3.5", "granite4", "lfm2"])
def test_leading_rows_are_computed_behind_all_before_them(name: str) -> None:
    """As many rows as the chunks have but for one: only that one's keys, values and state are the stored ones."""
    some = fused(name, Epic(link_tokens=39), CHUNKS[3:])
    assert (some.tokens.recomputed, int(some.recomputed.sum())) == (39, 39)
    assert off_full(some, name) <= off_full(fused(name, Reuse(), CHUNKS[3:]), name)
    first = fused(name, Epic(link_tokens=5), CHUNKS[:2])
    for layer, buffer in enumerate(first.cache.buffers):
        if hasattr(buffer, "keys"):
            full = decoder(name).prefill([*PREFIX, *CHUNKS[0][:5]])[1].buffers[layer]
            stop = len(PREFIX) + 5
            assert torch.allclose(buffer.keys[:, :, :stop], full.keys[:, :, :stop], atol=EXACT)


@pytest.mark.parametrize("place", [("rows", 3), ("state", 0)])
def test_what_is_damaged_is_computed_in_its_place(place: Place) -> None:
    done = fused("qwen3.5", Reuse(), CHUNKS[:2], broken=place)
    *_, last, _ = done.plan.segments
    assert (last.status, last.reason, done.tokens.fresh) == ("miss", "damaged", len(CHUNKS[1]) + len(QUESTION))
    assert off_full(done, "qwen3.5") < off_full(fused("qwen3.5", Reuse(), CHUNKS[:2]), "qwen3.5")


# ---- what the gate finds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "bamba", "nemotron-h"])
def test_the_gate_passes_and_says_what_is_lost(name: str) -> None:
    verdict = check_apart(identity(WARM), decoder(name), CHUNKS[:2], QUESTION, 1e-3)
    assert verdict.passed
    assert [check.law for check in verdict.checks] == [1, 3, 4]
    assert set(verdict.losses) == {"reuse", "epic"}
    assert 0 < verdict.losses["epic"] < verdict.losses["reuse"] < 10
    with pytest.raises(GateError, match="nats a token"):
        verdict.enforce_loss("reuse", verdict.losses["reuse"] / 2)
    verdict.enforce_loss("reuse", verdict.losses["reuse"])


@pytest.mark.parametrize("name", ["qwen3.5", "granite4"])
def test_states_that_are_carried_wrongly_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "carried", lambda carry, state: 0 * state)
    verdict = check_apart(identity(WARM), decoder(name), [CHUNKS[2]], QUESTION, 1e-3)
    assert [check.law for check in verdict.checks if not check.passed] == [4]


def test_a_model_that_begins_anew_at_every_pass_is_refused() -> None:
    (name,) = {*HYBRIDS} - {*GOES_ON}
    assert not check_apart(identity(WARM), decoder(name), CHUNKS[:2], QUESTION, 1e-3).passed


def test_what_one_identity_cannot_tell_is_refused_with_what_it_would_need() -> None:
    with pytest.raises(ModelError, match=r"4 x 2 are carried by more than one number; that would need"):
        alone._carry(torch.arange(8.0).view(1, 1, 4, 2))
    states = {("recurrent", 0): torch.zeros(1, 1, 2, 2)}
    with pytest.raises(ModelError, match=r"not known here; that would need") as caught:
        alone._own(states, states, [])
    assert "--fusion prefix" in caught.value.hint


def test_other_passes_through_the_layers_are_left_alone() -> None:
    """A question that another thread answers while a chunk is computed keeps its states, and gives the chunk none."""
    name, other = "qwen3.5", CHUNKS[1]
    own = decoder(name)
    behind = alone.Behind(own, WARM)
    _, plain = own.prefill(other)
    watch = alone._Carrying(own, behind, [alone._identity])
    hooks = watch.hooked(behind.new_cache(own, 8))
    try:
        _, beside = own.prefill(other)
    finally:
        for hook in hooks:
            hook.remove()
    assert not watch.differences
    for one, two in zip(plain.state_layers, beside.state_layers, strict=True):
        assert all(torch.equal(state, two.states()[key]) for key, state in one.states().items())


@pytest.mark.parametrize(
    ("tokens", "window"), [(1, [0, 0, 0, 4]), (3, [0, 2, 3, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4])]
)
def test_a_window_at_a_prompts_very_beginning_has_nothing_of_the_lead_in(tokens: int, window: list[int]) -> None:
    """Of a chunk that is shorter than the window, and stands first in a prompt without a beginning of its own."""
    own = {(CONV, 0): torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float32)}
    assert alone.follow({}, own, tokens)[CONV, 0].tolist() == [[window]]
