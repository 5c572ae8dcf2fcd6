"""A bounded store in front of a tier, simulated: it keeps to its budget, and what is asked often is fetched once."""

from __future__ import annotations

import random

import pytest

from kvtool.lab.simulator.fronts import LEVELS, Frequency, Front, Policy, Recency, Warmth, play

WHOLE = sum(LEVELS.values())


def questions(length: int) -> list[list[int]]:
    """Every third is about one of five chunks, the others about any of a hundred."""
    draw = random.Random(1)
    return [[draw.randrange(5 if at % 3 == 0 else 100)] for at in range(length)]


@pytest.mark.parametrize(
    "policy",
    [
        Policy(Recency),
        Policy(Recency, by_level=True),
        Policy(Frequency),
        Policy(Warmth, admits=True),
        Policy(Warmth, admits=True, by_level=True),
    ],
)
def test_within_the_budget_and_nothing_without_its_base(policy: Policy) -> None:
    front = Front([1.0] * 100, 20 * WHOLE, policy)
    for at, question in enumerate(questions(300)):
        front.ask(question, at)
        assert front.used == pytest.approx(sum(LEVELS[level] for held in front.held.values() for level in held))
        assert front.used <= 20 * WHOLE
        assert all(held in ({"4"}, {"4", "3"}, {"4", "3", "2"}) for held in front.held.values())


def test_warmth_keeps_what_is_asked_often() -> None:
    asked = questions(2000)
    fetched = {
        name: play([1.0] * 100, asked, 10 * WHOLE, policy, since=200).fetched
        for name, policy in {"recency": Policy(Recency), "warmth": Policy(Warmth, admits=True)}.items()
    }
    assert fetched["warmth"] < 0.85 * fetched["recency"]
    assert play([1.0] * 100, asked, 1000 * WHOLE, Policy(Recency), since=1000).whole > 0.99


def test_a_front_smaller_than_a_question_is_not_driven_out() -> None:
    front = Front([1.0] * 5, 2 * WHOLE, Policy(Warmth, admits=True))
    front.ask(range(5), 0)
    kept = {*front.held}
    assert len(kept) == 2
    assert front.ask(range(5), 1) == pytest.approx(3 * WHOLE)
    assert {*front.held} == kept
