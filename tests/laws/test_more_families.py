"""The laws over families whose layers are of no new kind: in both formats, with the modes that differ in what they do.

A mode that reuses all, one that recomputes rows chosen in advance, one that chooses them on the way, and one that asks
the question's attention: what each other mode does is one of these, over the same attention.
"""

from __future__ import annotations

import pytest

from kvtool.core.fusion.selectors import SELECTORS
from tests.codec import test_families
from tests.families import LIKE
from tests.fusion import test_question
from tests.fusion.making import BOS, CHUNKS, DTYPES, IDLE, LOSSLESS, MOE, PREFIX, Case, case
from tests.laws import (
    test_1_recompute_everything,
    test_2_recompute_nothing,
    test_3_one_chunk,
    test_4_moved_chunk,
    test_5_causality,
    test_10_no_accident,
)
from tests.laws.test_5_causality import OTHER_QUESTION

MODES = ("reuse", "epic", "blend", "union")
BOTH = [(name, dtype) for dtype in DTYPES for name in LIKE]
# A score that bfloat16 rounds may choose another expert, and logits of random weights are then others altogether:
# by how much is no measure of anything. What `mixtral` and `gpt-oss` show in bfloat16 stands for these.
STEADY = [(name, dtype) for name, dtype in BOTH if dtype == "float32" or name not in MOE]


@pytest.fixture(params=BOTH, ids="-".join)
def like(request: pytest.FixtureRequest) -> Case:
    """Every one of them in both dtypes; shared between tests, so it must be left whole."""
    return case(*request.param)


@pytest.fixture(params=STEADY, ids="-".join)
def steady(request: pytest.FixtureRequest) -> Case:
    return case(*request.param)


@pytest.mark.some(12)
def test_recompute_everything_is_full_prefill(steady: Case) -> None:
    for name in ("union", "full", "epic", "blend"):  # the longest answer first: the others are its beginning
        test_1_recompute_everything.holds(steady, LOSSLESS[name], BOS, test_1_recompute_everything.length(name))


@pytest.mark.some(12)
def test_recompute_nothing_is_reuse(like: Case) -> None:
    for name in ("epic", "blend", "union"):
        test_2_recompute_nothing.holds(like, IDLE[name])


def test_one_chunk_is_full_prefill(steady: Case) -> None:
    for name in MODES:
        test_3_one_chunk.holds(steady, SELECTORS[name]())


@pytest.mark.parametrize("position", [len(PREFIX), 1900])
def test_a_moved_chunk_is_prefilled_there(steady: Case, position: int) -> None:
    test_4_moved_chunk.holds(steady, position)


def test_another_question_changes_no_context_row(like: Case) -> None:
    for name in ("epic", "blend"):
        test_5_causality.holds(like, CHUNKS, CHUNKS, SELECTORS[name](), OTHER_QUESTION)


def test_a_chunk_is_the_same_in_every_batch_and_order(like: Case) -> None:
    test_10_no_accident.holds(like, test_10_no_accident.ALIKE)


@pytest.mark.parametrize("name", LIKE)
def test_the_question_looks_where_the_model_would(name: str) -> None:
    test_question.check_layers(case(name))


@pytest.mark.parametrize("name", LIKE)
def test_levels_are_within_the_error_that_they_state(name: str) -> None:
    one = case(name)
    for level in test_families.LEVELS:
        test_families.holds(one.kept[one.candidate(CHUNKS[1], BOS).chunk_id].layers, level)
