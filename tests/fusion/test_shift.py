"""Shifted reuse against a reference of its own, and what it must leave unchanged."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtool.core.fusion import shift
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.native.isa import isa_here
from kvtool.core.query.fuse_prompt import extend_fused, joined
from tests.fusion.making import BOS, CHUNKS, NAMES, Case, Fixed, case, new_case, plain_model, same_bits, swapped
from tests.fusion.test_against_transformers import masks_of, reused
from tests.fusion.test_condense import fuse as fuse_condensed

ALLOWED = 1e-4


class Shifting(DynamicCache):
    """Written row by row as the paper says it: the mean change of a chunk's probes, taken off its positions, is added
    to the chunk's other rows at theirs, times sensitivity over the mean sensitivity of the probes."""

    def __init__(self, name: str, model: Any, plan: Plan, past: DynamicCache, rows: Sequence[int]) -> None:
        super().__init__()
        self.rotary, self.apply = model.get_decoder().rotary_emb, _rotation_of(model)
        self.model = model
        self.plan, self.past, self.written = plan, past, torch.tensor(rows)
        self.whole = name != "stablelm"  # its attention gives the function that part of a head which is rotated
        self.kinds = case(name, "float32").decoder.kinds

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.plan.length, 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = swapped(self.model, keys, values)
        room = [torch.zeros(1, side.shape[1], self.plan.length, side.shape[3]) for side in (keys, values)]
        old = self.past.layers[layer]
        for side, stored in zip(room, swapped(self.model, old.keys, old.values), strict=True):
            side[:, :, : stored.shape[2]] = stored
        changes = [new - side[:, :, self.written] for new, side in zip((keys, values), room, strict=True)]
        for new, side in zip((keys, values), room, strict=True):
            side[:, :, self.written] = new
        for segment in self.plan.cached_chunks:
            if segment.status == "hit":
                self._shift(segment.start, segment.stop, layer, room, changes)
        return swapped(self.model, *room)

    def _shift(self, start: int, stop: int, layer: int, room: list[Any], changes: list[Any]) -> None:
        probes = [index for index, row in enumerate(self.written.tolist()) if start <= row < stop]
        others = [row for row in range(start, stop) if row not in self.written.tolist()]
        if len(probes) < 4 or not others:
            return
        sensitivity, rows = self.plan.sensitivity(), self.written[probes]
        keys = self._turned(changes[0][:, :, probes], rows, layer, -1).mean(2, keepdim=True)
        values = changes[1][:, :, probes].mean(2, keepdim=True)
        for row in others:
            share = min(float(sensitivity[row] / sensitivity[rows].mean()), 2.0)
            room[0][:, :, [row]] += self._turned(share * keys, torch.tensor([row]), layer, 1)
            room[1][:, :, [row]] += share * values

    def _turned(self, keys: torch.Tensor, rows: torch.Tensor, layer: int, sign: int) -> torch.Tensor:
        rotation = self.kinds[layer].rotation
        if rotation is None:
            return keys
        angles = self.rotary(torch.empty(0), rows[None], *([rotation] if rotation else []))
        if isinstance(angles, torch.Tensor):  # complex numbers
            pairs = torch.view_as_complex(keys.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * angles[:, None] ** sign).flatten(-2)
        cos, sin = angles
        scale = (cos.square() + sin.square()) if sign < 0 else torch.ones(())
        part = keys.shape[-1] if self.whole else cos.shape[-1]
        turned = self.apply(keys[:, :0, :, :part], keys[..., :part], cos / scale, sign * sin / scale)[1]
        return torch.cat([turned, keys[..., part:]], -1)


def _rotation_of(model: Any) -> Any:
    module = sys.modules[type(model.get_decoder().layers[0].self_attn).__module__]
    apply = getattr(module, "apply_rotary_pos_emb", None)
    if apply is None or "q" in inspect.signature(apply).parameters:
        return apply
    return lambda queries, keys, cos, sin: (queries, apply(keys, cos, sin))  # one of both at a time


def expected(name: str, plan: Plan, rows: Sequence[int]) -> torch.Tensor:
    model = plain_model(name, "float32")
    question = plan.segments[-1]
    computed = [*rows, *range(question.start, question.stop)]
    cache: Any = Shifting(name, model, plan, reused(model, plan, BOS), computed)
    mask = masks_of(model, torch.tensor(computed), torch.arange(plan.length))
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([[plan.ids[row] for row in computed]]),
            position_ids=torch.tensor([computed]),
            attention_mask=mask,
            past_key_values=cache,
        )
    logits: torch.Tensor = out.logits[0, -1]
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_the_reference_gives(name: str) -> None:
    shared = case(name)
    plan = shared.plan(lead_in=BOS)
    fused = shared.fuse(plan, Epic(5))
    rows = Epic(5).rows(plan).nonzero()[:, 0].tolist()
    logits = expected(name, plan, rows)
    assert float((fused.logits.cpu() - logits).abs().max()) <= ALLOWED
    plain = shared.fuse(plan, Epic(5, shift=False))
    assert float((plain.logits.cpu() - logits).abs().max()) > 10 * ALLOWED  # it does something


@pytest.mark.slow
@pytest.mark.skipif(isa_here() is None, reason="there is no machine code")
def test_without_machine_code_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit of a sum, in every layer; partial rotations, and layers without any, too."""
    for name in ("llama", "phi3", "smollm3"):
        own = new_case(name)
        plan = own.plan(lead_in=BOS)
        with monkeypatch.context() as patched:
            patched.setattr(shift, "rows_of", None)  # what torch would take the rows by
            by_code = own.fuse(plan, Epic(5))
        with monkeypatch.context() as patched:
            patched.setattr(shift, "shift_kernel", lambda *_: None)
            by_torch = own.fuse(plan, Epic(5))
        assert by_code.shifted.to_json() == pytest.approx(by_torch.shifted.to_json(), rel=1e-5)
        for one, other in zip(by_code.cache.buffers, by_torch.cache.buffers, strict=True):
            torch.testing.assert_close(one.view(), other.view(), rtol=0, atol=1e-5)


def test_rows_that_blend_drops_keep_what_their_layer_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the layer at which it drops them; from the next on they are reused, and shifted."""
    own = new_case("llama")
    plan = own.plan(lead_in=BOS)
    plain, shifted = (own.fuse(plan, Blend(0.1, filter_layers=0, shift=wanted)) for wanted in (False, True))
    hits = plan.hit_rows()
    assert torch.equal(plain.recomputed, shifted.recomputed)
    for layer, same in ((0, True), (1, True), (2, False)):
        one, other = plain.cache.buffers[layer].keys[0], shifted.cache.buffers[layer].keys[0]
        assert torch.equal(one[:, hits], other[:, hits]) == same


def test_a_chunk_with_three_probes_or_fewer_is_left_alone(llama: Case, plan: Plan) -> None:
    second, fourth = plan.chunks[1], plan.chunks[3]
    chosen = plan.mask()
    probes = [fourth.start, fourth.start + 1, fourth.start + 7, fourth.start + 9]
    chosen[[second.start, second.start + 3, second.start + 5, *probes]] = True
    fused = llama.fuse(plan, ShiftedRows(chosen))
    moved = fused.shifted.rows
    assert moved.nonzero()[:, 0].tolist() == [row for row in range(fourth.start, fourth.stop) if row not in probes]
    assert 0 < fused.shifted.common <= 1
    assert fused.shifted.size > 0


def test_no_row_takes_more_than_twice_the_change(llama: Case, plan: Plan) -> None:
    """A probe of hardly any sensitivity would otherwise throw the others far away."""
    plan = with_sensitivities(plan, {chunk: [1e-4] * 2 + [4.0] * (len(chunk.ids) - 2) for chunk in plan.chunks})
    chosen = plan.mask()
    for chunk in plan.chunks[1::2]:
        chosen[chunk.start : chunk.start + 2] = True
    fused = llama.fuse(plan, ShiftedRows(chosen))
    assert fused.shifted.size <= 2


def test_a_chunk_whose_sensitivity_was_not_kept_is_left_alone(llama: Case, plan: Plan) -> None:
    """Every row would take the whole change of those that move most."""
    some, none = (with_sensitivities(plan, dict.fromkeys(chunks, ())) for chunks in (plan.chunks[:2], plan.chunks))
    moved = llama.fuse(some, Epic(5)).shifted.rows
    assert not moved[: plan.chunks[2].start].any()
    assert moved[plan.chunks[3].start :].any()
    assert same_bits(llama.fuse(none, Epic(5)), llama.fuse(none, Epic(5, shift=False)))


def test_where_no_row_takes_anything_nothing_is_shifted(llama: Case, plan: Plan) -> None:
    """And the report says so: a mean over no rows does not exist."""
    fourth = plan.chunks[3]
    still = with_sensitivities(plan, {fourth: [4.0] * 2 + [0.0] * (len(fourth.ids) - 2)})
    chosen = plan.mask()
    chosen[fourth.start : fourth.start + 2] = True
    fused = llama.fuse(still, ShiftedRows(chosen))
    assert fused.shifted.to_json() == {"tokens_shifted": 0, "size": 0.0, "common": 0.0}
    assert same_bits(fused, llama.fuse(still, Fixed(chosen)))


def with_sensitivities(plan: Plan, changed: Mapping[Segment, Sequence[float]]) -> Plan:
    def of(segment: Segment) -> Segment:
        numbers = torch.tensor(changed[segment][: len(segment.ids)]).half().numpy().tobytes()
        return replace(segment, source=replace(segment.source, sensitivity=numbers))

    return Plan(tuple(of(segment) if segment in changed else segment for segment in plan.segments))


@dataclass(frozen=True)
class ShiftedRows(Fixed):
    shift: bool = True


def test_rounds_shift_what_is_new_and_add_up() -> None:
    own = new_case("llama")
    first = own.fuse(own.plan(CHUNKS[:2], lead_in=BOS), Epic(5))
    further = own.plan(CHUNKS, lead_in=BOS)
    chunks = [segment.source for segment in further.chunks[2:]]
    before = [buffer.keys[0, :, : first.plan.segments[-1].start].clone() for buffer in first.cache.buffers]
    now = extend_fused(own.decoder, first, chunks, Epic(5), own.source)
    both = joined(first, now)
    start = first.plan.segments[-1].start
    for buffer, rows in zip(now.cache.buffers, before, strict=True):
        assert torch.equal(buffer.keys[0, :, :start], rows)
    assert not now.shifted.rows[:start].any()
    assert int(both.shifted.rows.sum()) == int(first.shifted.rows.sum()) + int(now.shifted.rows.sum()) > 0


@pytest.mark.parametrize("selector", [Epic(5), Blend(0.3)], ids=["epic", "blend"])
def test_where_rows_are_missing_nothing_is_shifted(llama: Case, selector: Epic | Blend) -> None:
    """Recomputed rows change by what they no longer see, too, which the reused ones have seen."""
    plain, wanted = (fuse_condensed(llama, replace(selector, shift=shift)) for shift in (False, True))
    assert plain.plan.dropped
    assert not wanted.shifted.rows.any()
    assert same_bits(plain, wanted)
