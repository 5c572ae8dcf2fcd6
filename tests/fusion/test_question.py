"""Attention of the question, against eager attention by unmodified `transformers`; and the rows chosen by it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtool.core.fusion.engine import question_attention
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import MOST_ASKING, Plan
from kvtool.core.fusion.selectors.base import Pooling
from kvtool.core.fusion.selectors.infoflow import Infoflow
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from tests.fusion.making import (
    BOS,
    CHUNKS,
    NAMES,
    PREFIX,
    QUESTION,
    Case,
    case,
    plain_model,
    same_bits,
    swapped,
    tokens,
)
from tests.spying import calls_of

LAYERS = 4
CONTEXT = sum(map(len, CHUNKS))


def ours(one: Case, plan: Plan, layers: range, pooling: Pooling = "rows") -> torch.Tensor:
    cache = one.decoder.new_cache(plan.length)
    cache.set_length(plan.length)
    with Loader(one.decoder, plan.cached, cache, one.source) as loader:
        return question_attention(one.decoder, plan, cache, loader, layers, pooling)


def eager(one: Case, plan: Plan, layers: range, pooling: Pooling = "rows") -> torch.Tensor:
    """Attention weights of the question over the fused cache of `reuse`, by `transformers`; then the pooling."""
    fused = one.fuse(plan, Reuse())
    start = plan.segments[-1].start
    past = DynamicCache()
    for layer, buffer in enumerate(fused.cache.buffers):
        sides = [side[:, :, :start].clone() for side in (buffer.keys, buffer.values)]
        past.update(*swapped(one.decoder.model, *sides), layer)
    ids = torch.tensor([plan.ids[start:]])
    positions = torch.arange(start, plan.length)[None]
    model = plain_model(one.name, one.dtype)
    with torch.inference_mode(), weights_as_used(model):
        out = model(input_ids=ids, position_ids=positions, past_key_values=past, output_attentions=True)
    weights = torch.stack([out.attentions[layer][0].float().mean(0) for layer in layers])
    rows, last = weights.square().sum(1).sqrt(), weights[:, -1]
    by_layer = {"rows": rows, "last": last, "both": (rows * last).sqrt()}[pooling]
    return by_layer.mean(0)


@contextmanager
def weights_as_used(model: Any) -> Iterator[None]:
    """Have a model whose sinks scale what was attended (Granite) give the weights that this comes to, not those that
    sum to 1. The scale is read off: what it attended over the mean of the values under the weights."""
    module = sys.modules[type(model).__module__]
    own = getattr(module, "eager_attention_forward", None)
    if own is None or not any(hasattr(part, "sinks") for part in model.modules()):
        yield
        return

    def attend(
        attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        attended, weights = own(attention, query, key, value, *rest, **more)
        mean = weights @ module.repeat_kv(value, attention.num_key_value_groups)
        scale = (attended.transpose(1, 2) * mean).sum(-1) / mean.square().sum(-1)
        return attended, weights * scale[..., None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", attend)
        yield


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_attention_of_the_model(name: str) -> None:
    check_layers(case(name))


def check_layers(one: Case) -> None:
    for layers in (range(2, LAYERS), range(1)):
        check_attention(one, one.plan(lead_in=BOS), layers)


def check_attention(one: Case, plan: Plan, layers: range = range(LAYERS), pooling: Pooling = "rows") -> None:
    mine, right = ours(one, plan, layers, pooling), eager(one, plan, layers, pooling)
    assert torch.allclose(mine, right, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["rows", "last", "both"])
@pytest.mark.parametrize("length", [1, 64, 65, 200])
def test_questions_of_any_length(llama: Case, length: int, pooling: Pooling) -> None:
    check_attention(llama, llama.plan(lead_in=BOS, question=tokens(length, 8)), pooling=pooling)


def test_a_hole_is_computed_before_it_is_looked_at(llama: Case) -> None:
    check_attention(llama, llama.plan(lead_in=BOS, holes=(1,)))


@pytest.mark.parametrize("ratio", [0.02, 0.15, 0.5])
def test_infoflow_recomputes_what_is_looked_at_most(llama: Case, plan: Plan, ratio: float) -> None:
    fused = llama.fuse(plan, Infoflow(ratio))
    count = math.ceil(round(ratio * CONTEXT, 6))
    attention = ours(llama, plan, range(LAYERS // 2, LAYERS))
    attention[~plan.hit_rows()] = -1
    assert set(fused.recomputed.nonzero()[:, 0].tolist()) == set(attention.topk(count).indices.tolist())
    assert fused.tokens.recomputed == count
    assert fused.tokens.rows == (count + len(QUESTION),) * LAYERS


@pytest.mark.parametrize("kind", [Infoflow, Union])
def test_nobody_asks_where_the_answer_changes_nothing(llama: Case, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing or everything is recomputed, or nothing is a hit: there is no pass of the question's own."""
    plan, single = llama.plan(lead_in=BOS), llama.plan(CHUNKS[:1], lead_in=PREFIX)
    holes = llama.plan(lead_in=BOS, holes=range(len(CHUNKS)))
    monkeypatch.setattr(type(llama.decoder), "fill_cache", None)
    for ratio in (0.0, 1.0):
        llama.fuse(plan, kind(ratio=ratio))
    llama.fuse(single, kind(ratio=0.15))
    llama.fuse(holes, kind(ratio=0.15))
    with pytest.raises(TypeError):
        llama.fuse(plan, kind(ratio=0.15))


def chosen_by(worth: torch.Tensor, plan: Plan, count: int) -> Sequence[int]:
    worth = torch.where(plan.hit_rows(), worth, torch.full_like(worth, -1))
    return sorted(worth.topk(count).indices.tolist())


def test_union_recomputes_what_is_looked_at_and_sensitive(llama: Case, plan: Plan) -> None:
    fused = llama.fuse(plan, Union(0.15))
    count = math.ceil(0.15 * CONTEXT)
    attention = ours(llama, plan, range(LAYERS // 2, LAYERS), "both")
    assert fused.recomputed.nonzero()[:, 0].tolist() == chosen_by(attention * plan.sensitivity(), plan, count)
    assert fused.recomputed.nonzero()[:, 0].tolist() != chosen_by(attention, plan, count)
    assert fused.tokens.rows == (count + len(QUESTION),) * LAYERS


def test_its_parameters(llama: Case, plan: Plan) -> None:
    count = math.ceil(0.15 * CONTEXT)
    fused = llama.fuse(plan, Union(0.15, from_depth=0.0, pooling="last", weighting=0.5))
    worth = ours(llama, plan, range(LAYERS), "last") * plan.sensitivity().sqrt()
    assert fused.recomputed.nonzero()[:, 0].tolist() == chosen_by(worth, plan, count)
    assert not torch.equal(fused.recomputed, llama.fuse(plan, Union(0.15)).recomputed)
    plain, infoflow = Union(0.15, pooling="rows", weighting=0.0), Infoflow(0.15)
    assert torch.equal(llama.fuse(plan, plain).recomputed, llama.fuse(plan, infoflow).recomputed)


def test_without_any_sensitivity_union_is_infoflow(llama: Case, plan: Plan) -> None:
    segments = [replace(one, source=replace(one.source, sensitivity=b"")) for one in plan.segments]
    bare = Plan(tuple(segments))
    assert bare.sensitivity().eq(1).all()
    assert same_bits(llama.fuse(bare, Union(pooling="rows")), llama.fuse(bare, Infoflow()))


def test_a_chunk_without_sensitivity_is_taken_as_the_mean(llama: Case, plan: Plan) -> None:
    first, *others = plan.chunks
    bare = replace(first, source=replace(first.source, sensitivity=b""))
    partly = Plan((plan.segments[0], bare, *others, plan.segments[-1])).sensitivity()
    there = [at for one in plan.cached if one is not first for at in range(one.start, one.stop)]
    assert torch.equal(partly[there], plan.sensitivity()[there])
    assert torch.allclose(partly[first.start : first.stop], plan.sensitivity()[there].mean())


def test_link_tokens_come_first(llama: Case, plan: Plan) -> None:
    fused = llama.fuse(plan, Union(0.15, links=3))
    links = [at for segment in plan.chunks for at in range(segment.start, min(segment.start + 3, segment.stop))]
    assert fused.recomputed[links].all()
    assert fused.tokens.recomputed == math.ceil(0.15 * CONTEXT)


@pytest.mark.parametrize("kind", [Infoflow, Union])
def test_another_question_chooses_other_rows(llama: Case, kind: Any) -> None:
    one = llama.fuse(llama.plan(lead_in=BOS), kind())
    other = llama.fuse(llama.plan(lead_in=BOS, question=tokens(len(QUESTION), 60)), kind())
    assert not torch.equal(one.recomputed, other.recomputed)
    assert same_bits(one, llama.fuse(llama.plan(lead_in=BOS), kind()))


def test_of_a_long_question_only_the_end_asks(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks the passages is computed of as many rows as are few, as if nothing else were asked."""
    end = tokens(MOST_ASKING, seed=5)
    whole = llama.plan(question=(*tokens(2 * MOST_ASKING, seed=6), *end))
    computed = calls_of(monkeypatch, type(llama.decoder), "fill_cache", lambda _, ids, *rest: len(ids))
    found, short = ours(llama, whole, range(2, LAYERS)), ours(llama, llama.plan(question=end), range(2, LAYERS))
    assert computed == [MOST_ASKING, MOST_ASKING]
    assert torch.equal(found[: len(short)], short)
    assert not found[len(short) :].any()
    rows = Union(ratio=0.5).rows(whole, found)
    assert rows.sum() == math.ceil(0.5 * CONTEXT)
    assert llama.fuse(whole, Union(ratio=0.5)).tokens.recomputed == rows.sum()
