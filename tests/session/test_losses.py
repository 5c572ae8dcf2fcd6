"""What is known of a level's loss."""

from __future__ import annotations

from typing import Any

import pytest

from kvtool.core.codec.levels import LEVELS, NO_PROFILE, Level
from kvtool.core.session.identity import MeasuredLosses, smallest_allowed

ONE, OTHER = "11" * 16, "22" * 16


class Some:
    """A store of one chunk; its nested records name the profile `ONE`."""

    def __init__(self, **more: Any) -> None:
        rows = {ONE: {"2": 0.1, "eight": 0.3}, OTHER: {"1": 0.2, "2": 0.4}, NO_PROFILE.hex(): {"4": 0.5}}
        self.state = {
            "losses": {maker: {at: {"kl_answer": loss} for at, loss in of.items()} for maker, of in rows.items()}
        }
        self.state |= more

    def codec_state(self) -> dict[str, Any]:
        return self.state

    def made_with(self, chunk_id: bytes, level: str) -> str | None:
        return ONE if LEVELS[level].nested else None


def test_a_nested_level_by_its_profile_and_another_whatever_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVELS, "eight", Level("eight", "eight:Eight"))
    for store in (Some(), Some(named_predictor=True)):
        losses = MeasuredLosses(store)  # type: ignore[arg-type]
        assert losses.of(b"chunk", ["raw", "1", "2", "4", "eight"]) == {"2": 0.1, "eight": 0.3}
        assert losses.of(b"chunk", ["1"]) == {}


def test_where_no_level_may_be_taken_it_is_the_one_that_loses_least() -> None:
    losses = {"3": 0.03, "4": 0.2, "keep50-raw": 0.4, "keep75-raw": 0.01}
    assert smallest_allowed(["3", "4", "keep50-raw"], losses, 0.001) == "3"
    assert smallest_allowed(["3", "keep75-raw", "keep50-raw"], losses, 0.001) == "keep75-raw"
    assert smallest_allowed(["4", "keep50-raw"], {}, 0.001) == "4"  # fewer rows lose more, as far as is known
    assert smallest_allowed(["keep50-2", "keep50-raw"], {"keep50-2": 0.5}, 0.001) == "keep50-2"
    assert smallest_allowed(["keep75-2", "keep50-raw"], {}, 0.001) == "keep50-raw"
    assert smallest_allowed(["3", "keep75-raw", "lossless"], losses, 0.001) == "lossless"
    assert smallest_allowed(["keep75-raw", "raw"], losses, 0.02) == "keep75-raw"
    assert smallest_allowed(["keep75-raw", "lossless"], losses, 0.02) == "lossless"  # which is the smaller, too
