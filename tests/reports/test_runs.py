from __future__ import annotations

import pytest

from kvtool.core.errors import UsageError
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.query.options import QueryOptions
from kvtool.reports.questions import parse_run, parse_runs


def names(*texts: str) -> list[str]:
    return [run.name for run in parse_runs(texts)]


def test_nothing_given_is_every_mode_by_default() -> None:
    assert names()[:3] == ["reuse", "epic:16", "blend:0.15"]
    lossy = [name for name, kind in SELECTORS.items() if not kind.lossless]
    assert [name.partition(":")[0] for name in names()] == lossy


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("reuse", "reuse"), ("epic", "epic:16"), ("epic:0", "epic:0"), ("epic:016", "epic:16")),
        *(("blend", "blend:0.15"), (" blend : 0.150 ", "blend:0.15"), ("blend:15%", "blend:0.15")),
        *(("union:7%", "union:0.07"), ("infoflow:1", "infoflow:1")),
        ("union+shift=no:15%", "union+shift=no:0.15"),
        ("union + shift=off", "union+shift=no:0.15"),
        ("union+weighting=0.50+shift=yes:5%", "union+shift=yes+weighting=0.5:0.05"),
        ("blend+metric=k_l1", "blend+metric=k_l1:0.15"),
    ],
)
def test_a_run_has_one_name(text: str, name: str) -> None:
    run = parse_run(text)
    assert run.name == name
    assert parse_run(run.name) == run


def test_lists() -> None:
    assert names("reuse,union:2%", "epic") == ["reuse", "union:0.02", "epic:16"]
    assert names("reuse,,reuse, blend:5%,blend:0.05") == ["reuse", "blend:0.05"]
    assert names("full,reuse,full") == ["reuse"]  # the reference runs anyway
    assert names("full") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("blond", "did you mean 'blend'"),
        ("auto", "known: full"),
        ("blend@prefix", "fusion mode"),
        ("union+shfit=no", "did you mean 'shift'"),
        ("union+ratio=3%", "no option 'ratio'"),
        ("reuse+shift=no", "leave it out"),
        ("union+shift=perhaps", "perhaps"),
        ("blend+metric=v", "v_sse"),
        ("", "known"),
        ("reuse:0.1", "write reuse"),
        ("reuse:", "write reuse"),
        ("blend:x", "is not a number or a percentage"),
        ("blend:1.01", "between 0 and 1"),
        ("epic:1.5", "is not a whole number"),
        ("epic:-1", "is less than 0"),
    ],
)
def test_bad_runs(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_run(text)
    assert repr(text) in caught.value.message
    assert said in caught.value.message + caught.value.hint


def test_a_list_of_nothing() -> None:
    with pytest.raises(UsageError, match="names no run"):
        parse_runs([" , "])


def test_the_amount_reaches_the_selector() -> None:
    base = QueryOptions(ratio=0.9, link_tokens=3)
    for mode in SELECTORS:
        for amount in ("", ":7%", ":7"):
            try:
                run = parse_run(mode + amount)
            except UsageError:
                continue
            selector = selector_for(run.options(base), run.mode)
            assert selector.name == mode
            if run.knob:
                assert getattr(selector, run.knob) == run.amount


def test_what_a_run_changes_reaches_its_mode() -> None:
    run = parse_run("union+shift=no+weighting=2:5%")
    expected = SELECTORS["union"](ratio=0.05, weighting=2, shift=False)
    assert selector_for(run.options(QueryOptions()), run.mode) == expected
