"""Plans of prompts: positions of segments, and which are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtool.core.cache.identity import ids_digest
from kvtool.core.fusion.plan import Candidate, Part, Plan, build_plan

PREFIX, A, B, QUESTION = (0, 1, 2), (10, 11, 12, 13), (20, 21), (30, 31)


def stored(ids: tuple[int, ...], behind: tuple[int, ...]) -> Candidate:
    return Candidate(ids, bytes(ids), ids_digest(behind), "raw")


def statuses(plan: Plan) -> list[str]:
    return [segment.status for segment in plan.segments]


def test_segments_stand_one_after_another() -> None:
    plan = build_plan(stored(PREFIX, ()), [stored(A, PREFIX), stored(B, PREFIX)], QUESTION)
    assert [(segment.start, segment.stop) for segment in plan.segments] == [(0, 3), (3, 7), (7, 9), (9, 11)]
    assert plan.ids == [*PREFIX, *A, *B, *QUESTION]
    assert plan.length == 11
    assert plan.mask("fresh").nonzero()[:, 0].tolist() == [9, 10]


NEIGHBOURS = [stored(A, PREFIX), stored(B, (*PREFIX, *A))]
LOST = Candidate(PREFIX, reason="not stored")


@pytest.mark.parametrize(
    ("prefix", "chunks", "expected"),
    [
        (stored(PREFIX, ()), [stored(A, PREFIX), stored(B, PREFIX)], ["exact", "exact", "hit"]),
        *(
            (stored(PREFIX, ()), [stored(A, behind), stored(B, behind)], ["exact", "hit", "hit"])
            for behind in ((), (0,), (0, 1), (1, 2), (0, 1, 2, 3))
        ),
        (stored(PREFIX, ()), NEIGHBOURS, ["exact", "exact", "exact"]),
        (stored(PREFIX, ()), NEIGHBOURS[::-1], ["exact", "hit", "hit"]),
        (Candidate((*PREFIX, 3), reason="not stored"), [stored(A, PREFIX)], ["miss", "hit"]),
        # Rows are full prefill's whether the segments before them were read or are computed in place.
        (LOST, [stored(A, PREFIX), stored(B, PREFIX)], ["miss", "exact", "hit"]),
    ],
)
def test_a_chunk_is_exact_after_its_own_lead_in_only(
    prefix: Candidate, chunks: list[Candidate], expected: list[str]
) -> None:
    plan = build_plan(prefix, chunks, QUESTION)
    assert statuses(plan) == [*expected, "fresh"]
    assert plan.segments[0].reason == prefix.reason


def test_the_rest_of_a_chunk_is_never_exact() -> None:
    """Its rows saw the chunk's beginning, which the prompt does not have."""
    whole = stored(A, PREFIX)
    for first, status in ((0, "exact"), (1, "hit")):
        part = replace(whole, ids=A[first:3], part=Part(first, 3, len(A)))
        assert statuses(build_plan(stored(PREFIX, ()), [part], QUESTION)) == ["exact", status, "fresh"]


def test_giving_up_a_record_leaves_the_rest() -> None:
    plan = build_plan(stored(PREFIX, ()), [stored(A, PREFIX), stored(A, PREFIX)], QUESTION)
    without = plan.without(plan.segments[2], "damaged")
    assert statuses(without) == ["exact", "exact", "miss", "fresh"]
    assert without.segments[2].reason == "damaged"
    assert without.ids == plan.ids


def test_a_prompt_without_chunks_or_prefix() -> None:
    plan = build_plan(stored((), ()), [], QUESTION)
    assert plan.ids == list(QUESTION)
    assert plan.chunks == ()
