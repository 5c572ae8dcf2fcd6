"""Descriptions of stretches: of today, of before what computed them was noted, and what is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvtool.core.cache.stretches import StretchInfo
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import DamagedError

INFO = StretchInfo(0, 7, (1,), (0,), (b"c" * 20,), True, 5, arithmetic=Arithmetic("bfloat16", "cuda"))


def test_what_computed_it_is_noted() -> None:
    assert StretchInfo.from_bytes(INFO.to_bytes()) == INFO


def test_one_of_before_is_read() -> None:
    row = json.loads(INFO.to_bytes())
    del row["arithmetic"]
    assert StretchInfo.from_bytes(json.dumps(row).encode()) == replace(INFO, arithmetic=None)


@pytest.mark.parametrize("made", [["int8", "cpu"], ["bfloat16"], 7])
def test_an_arithmetic_that_is_none_is_damage(made: object) -> None:
    row = json.loads(INFO.to_bytes()) | {"arithmetic": made}
    with pytest.raises(DamagedError):
        StretchInfo.from_bytes(json.dumps(row).encode())


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": [70_000]},  # no part's key has room for it
        {"states": [-1]},
        {"states": ["0"]},
        {"tokens": -7},
        {"start": 0.5},
        {"size": 2**70},
        {"size": True},
        {"chunks": ["ab"]},
    ],
    ids=str,
)
def test_numbers_that_can_be_none_are_damage(changed: dict[str, object]) -> None:
    with pytest.raises(DamagedError):
        StretchInfo.from_bytes(json.dumps(json.loads(INFO.to_bytes()) | changed).encode())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"rows": [Infinity]}', "7", "", "\0"], ids=lambda text: text[:9])
def test_what_is_no_description_is_damage(text: str) -> None:
    with pytest.raises(DamagedError):
        StretchInfo.from_bytes(text.encode())
