"""Errors are compared with what is recorded, and every entry has its test."""

from __future__ import annotations

import re

import pytest

from kvtool.core.errors import UsageError
from tests import wording


@pytest.mark.parametrize(("numbers", "known"), [(False, "level N\nhint"), (True, "level 3\nhint")])
def test_another_wording_and_a_missing_entry_fail(numbers: bool, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "test_wording.py::test_another_wording_and_a_missing_entry_fail"
    for name, value in (("RECORDS", False), ("_recorded", {}), ("KNOWN", {place: known, f"{place} #3": "level 3"})):
        monkeypatch.setattr(wording, name, value)
    with wording.refused(UsageError, numbers=numbers):
        raise UsageError("level 3", "hint")
    for hint in ("another", "hint", "hint"):
        with pytest.raises(AssertionError), wording.refused(UsageError, numbers=numbers):
            raise UsageError("level 3", hint)
        wording.KNOWN.pop(place, None)


def test_every_entry_has_its_test() -> None:
    for key in wording.KNOWN:
        name, *_, function = re.split(r"\[| #", key)[0].split("::")
        assert f"def {function}(" in (wording.FILE.parent / name).read_text("utf-8"), key
