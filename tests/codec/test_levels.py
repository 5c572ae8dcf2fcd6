"""Levels of compression: their order, names and stated losses."""

from __future__ import annotations

import pytest

from kvtool.core.codec.levels import (
    LEVELS,
    NESTED,
    RAW,
    check_level,
    coarser,
    enough_loss,
    exact,
    known,
    level_of,
    lossy,
    nested,
)
from kvtool.core.errors import UsageError
from tests.wording import refused


def test_what_loses_nothing_comes_first_and_the_coarsest_last() -> None:
    """Code that gives up the finer levels first, or reads the finest stored one, relies on this order."""
    assert [*LEVELS] == [*exact(), *lossy()]
    assert nested() == [*NESTED]
    assert [coarser(level) for level in NESTED] == [*NESTED[1:], None]
    assert all(LEVELS[level].lossless is False for level in NESTED)


def test_some_of_them_in_order() -> None:
    assert known(["2", "another version's", None, "lossless", "1", RAW]) == [RAW, "lossless", "1", "2"]
    assert exact(["2", "lossless", "1"]) == ["lossless"]
    assert lossy(["2", "lossless", "1"]) == ["1", "2"]


def test_one_that_is_not_known() -> None:
    level = level_of("another version's")
    assert (level.lossless, level.verbatim, level.nested) == (False, False, False)
    assert coarser(level.name) is None
    with refused(UsageError):
        check_level(level.name)


def test_the_prompts_beginning_is_never_lossy() -> None:
    assert all(level_of(level.of_prefix).lossless for level in LEVELS.values())
    assert [level_of(level).of_prefix for level in exact()] == exact()


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.02, 0.1244, 0.1188, 2.3])
def test_what_is_said_to_be_enough_is(loss: float) -> None:
    assert loss <= float(enough_loss(loss)) < loss + 0.00101
