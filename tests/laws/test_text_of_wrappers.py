"""The laws over text models of multimodal ones, saved as a whole and loaded from disk; held against the whole model."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.model.decoder import Decoder
from tests.codec import test_families
from tests.families import tiny_model
from tests.fusion import test_question
from tests.fusion.making import BOS, CHUNKS, DEVICE, DTYPES, IDLE, LOSSLESS, MOE, Case, plain_model
from tests.laws import (
    test_1_recompute_everything,
    test_2_recompute_nothing,
    test_3_one_chunk,
    test_4_moved_chunk,
    test_5_causality,
)
from tests.laws.test_5_causality import OTHER_QUESTION
from tests.wrappers import WRAPPERS, loaded_text

STEADY = [(name, dtype) for dtype in DTYPES for name in WRAPPERS if dtype == "float32" or name not in MOE]


@cache
def text_of(name: str, dtype: str) -> Case:
    return Case(name, dtype, Decoder(loaded_text(name, dtype, DEVICE)))


@pytest.fixture(params=STEADY, ids="-".join)
def text(request: pytest.FixtureRequest) -> Case:
    """Shared between tests, so it must be left whole."""
    return text_of(*request.param)


def test_recompute_everything_is_full_prefill(text: Case) -> None:
    for name in ("full", "epic", "blend", "union"):
        test_1_recompute_everything.holds(text, LOSSLESS[name], BOS, test_1_recompute_everything.length(name))


def test_recompute_nothing_is_reuse(text: Case) -> None:
    for name in ("epic", "blend", "union"):
        test_2_recompute_nothing.holds(text, IDLE[name])


def test_one_chunk_is_full_prefill(text: Case) -> None:
    for name in ("reuse", "epic", "blend", "union"):
        test_3_one_chunk.holds(text, SELECTORS[name]())


def test_a_moved_chunk_is_prefilled_there(text: Case) -> None:
    test_4_moved_chunk.holds(text, 1900)


def test_another_question_changes_no_context_row(text: Case) -> None:
    test_5_causality.holds(text, CHUNKS, CHUNKS, SELECTORS["blend"](), OTHER_QUESTION)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_question_looks_where_the_model_would(name: str) -> None:
    test_question.check_layers(text_of(name, "float32"))


@pytest.mark.parametrize("name", WRAPPERS)
def test_levels_are_within_the_error_that_they_state(name: str) -> None:
    one = text_of(name, "float32")
    for level in test_families.LEVELS:
        test_families.holds(one.kept[one.candidate(CHUNKS[1], BOS).chunk_id].layers, level)


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_weight_of_what_it_sees_is_kept(name: str) -> None:
    whole, text = (
        sum(weight.numel() for weight in model.parameters())
        for model in (tiny_model(name, "float32"), text_of(name, "float32").decoder.model)
    )
    embedding = plain_model(name, "float32").get_input_embeddings().weight.numel()
    assert 2 * embedding < text < whole - 1000


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v"])
def test_equal_positions_in_three_dimensions_are_one(name: str) -> None:
    """The model's own rotary module, given a row of positions and given it three times, gives the same bits."""
    decoder = text_of(name, "float32").decoder
    at = torch.tensor([0, 1, 77, 1900])
    like = torch.empty(0)
    one = decoder.base.rotary_emb(like, at[None])
    three = decoder.base.rotary_emb(like, at[None, None].expand(3, 1, -1))
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    apart = at[None, None] + torch.tensor([0, 1, 2])[:, None, None]
    assert not torch.equal(decoder.base.rotary_emb(like, apart)[0], one[0])
