"""`kvtool inspect quality --defer`: what every round would have answered, and the threshold that is drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool.lab.measure.defer import NEVER, bins, choose, defer_overview, policy
from tests.cli.working import QUESTION, Done, kvtool

MODES = ("--runs", "reuse,union:20%")


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    return write_batch(tmp_path / "questions.jsonl")


def write_batch(path: Path, **changes: Any) -> Path:
    rows = [
        {"id": "a", "question": QUESTION, "answers": ["baker B", "1769"], "documents": ["mill1.md"]},
        {"id": "b", "question": "When was the first mill built?", "answers": ["1700"]},
    ]
    rows[1] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def calibrate(store: Path, batch: Path, *more: object) -> Done:
    modes = () if "--runs" in more else MODES
    return kvtool(
        "inspect", "quality", "--defer", "--batch", batch, "--store", store, "--max-tokens", "6", *modes, *more
    )


def test_it_keeps_a_threshold_for_each_mode(store: Path, batch: Path) -> None:
    value = calibrate(store, batch, "--json").fine().json
    assert [run["run"] for run in value["runs"]] == ["reuse", "union:0.2"]
    (path,) = (store / "defer").iterdir()
    kept = json.loads(path.read_text())["modes"]
    assert {name: one["threshold"] for name, one in kept.items()} == {
        run["run"].partition(":")[0]: run["threshold"] for run in value["runs"]
    }
    for run in value["runs"]:
        assert run["count"] == 2
        assert run["all"]["bytes_share"] == 1
        assert run["first"]["chunks"] == 2
        assert run["first"]["bytes_read"] < run["all"]["bytes_read"]
        assert all(run["chosen"][name] >= run["whole"][name] - 0.01 for name in ("f1", "contains"))
        assert run["whole"]["bytes_read"] == run["all"]["bytes_read"]
        shares = [one["bytes_share"] for one in run["policies"]]
        assert shares == sorted(shares)
    row = kvtool("query", QUESTION, "--store", store, "--defer", "--json", "--max-tokens", "2").fine().json
    assert "(calibrated)" in row["rounds"][0]["reason"]


def test_rounds_are_those_of_a_query(store: Path, batch: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    calibrate(store, batch, "--resume", results, "--top-k", "5").fine()
    _, _, row = (json.loads(line) for line in results.read_text().splitlines())
    for run, fusion in (("reuse", ("reuse",)), ("union:0.2", ("union", "--ratio", "0.2"))):
        rounds = row["runs"][run]["rounds"]
        assert [one["chunks"] for one in rounds] == [2, 4, 5]
        asked = ("--fusion", *fusion, "--max-tokens", "6", "--min-score", "0", "--json")
        whole = kvtool("query", "When was the first mill built?", "--store", store, *asked).fine().json
        assert row["runs"][run]["whole"]["answer"] == whole["answer"]
        for one, number in zip(rounds, (2.0, rounds[0]["confidence"]), strict=False):
            asked = ("--defer-threshold", number, "--fusion", *fusion, "--max-tokens", "6", "--top-k", "5")
            done = kvtool("query", "When was the first mill built?", "--store", store, "--defer", *asked, "--json")
            told = done.fine().json
            at = len(told["rounds"]) - 1
            assert told["answer"] == rounds[at]["answer"]
            assert told["rounds"][0]["confidence"] == rounds[0]["confidence"]
            assert told["bytes_read"] == sum(other["bytes_read"] for other in rounds[: at + 1])
            assert at == (2 if number == 2.0 else 0) or one["refused"]


def test_it_goes_on_where_it_was(store: Path, batch: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    calibrate(store, batch, "--resume", results, "--limit", "1", "--json").fine()
    whole = calibrate(store, batch, "--resume", results, "--json").fine().json
    assert whole == calibrate(store, batch, "--json").fine().json
    before = results.read_bytes()
    assert calibrate(store, batch, "--resume", results, "--json").fine().json == whole
    assert results.read_bytes() == before
    calibrate(store, batch, "--resume", results, "--defer-first", "3").failed(2, "other settings", "rounds")


def test_the_page(store: Path, batch: Path, tmp_path: Path) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "figures"
    folder.mkdir()
    calibrate(store, batch, "--html", page, "--figures", folder).fine()
    assert sorted(path.name for path in folder.iterdir()) == ["defer-calibration.svg", "defer-threshold.svg"]
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "held out" in text


@pytest.mark.parametrize(
    ("more", "said"), [((), "answer"), (("--runs", "full"), "use the cache"), (("--runs", "union:1%,union:2%"), "once")]
)
def test_what_cannot_be_calibrated(store: Path, tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    changes = {} if more else {"answers": []}
    calibrate(store, write_batch(tmp_path / "some.jsonl", **changes), *more).failed(2, said)


# ---- what a threshold is drawn from ----


def asked(*rounds: tuple[float, float], whole: float | None = None, refused: bool = False) -> dict[str, Any]:
    """A question by (confidence, score) of its rounds, 2, 4, 8 … chunks; every round reads 10 bytes a chunk.

    `whole`: the score of one pass; None: as good as the last round.
    """
    rows, stood = [], 0
    for number, (sure, right) in enumerate(rounds):
        chunks = 2 ** (number + 1)
        row = {"chunks": chunks, "confidence": sure, "refused": refused, "bytes_read": 10 * (chunks - stood)}
        rows.append(row | {"f1": right, "contains": right, "exact_match": right})
        stood = chunks
    score = rounds[-1][1] if whole is None else whole
    one_pass = {"chunks": stood, "bytes_read": 10 * stood, "f1": score, "contains": score, "exact_match": score}
    return {"rounds": rows, "whole": one_pass}


SURE_IS_RIGHT = [
    asked((0.9, 1), (0.9, 1)),
    asked((0.8, 1), (0.8, 1)),
    asked((0.3, 0), (0.5, 1)),
    asked((0.2, 0), (0.5, 1)),
]


def test_the_lowest_threshold_that_loses_nothing() -> None:
    assert choose(SURE_IS_RIGHT) == 0.35
    assert policy(SURE_IS_RIGHT, 0.35) | {"threshold": 0.8} == policy(SURE_IS_RIGHT, 0.8)
    found = policy(SURE_IS_RIGHT, 0.8)
    assert (found["f1"], found["chunks"], found["bytes_share"]) == (1, 3, 0.75)
    assert policy(SURE_IS_RIGHT, NEVER)["bytes_share"] == 1
    assert policy(SURE_IS_RIGHT, 0.0)["f1"] == 0.5


def test_where_the_first_round_is_as_good_it_is_enough() -> None:
    assert choose([asked((0.1, 1), (0.9, 1)), asked((0.2, 0), (0.9, 0))]) == 0


def test_where_confidence_says_nothing_all_is_loaded() -> None:
    assert choose([asked((1.0, 0), (0.1, 1)), asked((0.4, 1), (0.1, 1))]) == NEVER


def test_it_is_held_against_one_pass() -> None:
    assert choose([asked((0.9, 0), (0.9, 0), whole=1)]) == 0  # nothing helps, and the first round costs least
    assert choose([asked((0.9, 0), (0.9, 1), whole=1)]) == 0.95
    assert choose([asked((0.9, 0), (0.9, 1), whole=0)]) == 0


def test_an_answer_that_says_nothing_is_never_enough() -> None:
    found = policy([asked((0.9, 0), (0.9, 1), refused=True)], 0.0)
    assert (found["f1"], found["chunks"]) == (1, 4)
    assert policy([asked((0.9, 0), (0.9, 1), refused=True)], -1.0)["chunks"] == 2  # the first round alone


def test_bins_leave_last_rounds_out() -> None:
    found = bins([*SURE_IS_RIGHT, asked((1.0, 1))])
    assert [(one["low"], one["count"], one["contains"]) for one in found] == [
        (0.2, 1, 0),
        (0.3, 1, 0),
        (0.8, 1, 1),
        (0.9, 1, 1),
    ]
    assert bins([asked((0.4, 1))]) == []


def test_held_out_questions_had_no_part_in_their_threshold() -> None:
    rows = {number: {"reuse": question} for number, question in enumerate(SURE_IS_RIGHT)}
    (run,) = defer_overview(rows)["runs"]
    assert run["held_out"]["thresholds"] == [choose(SURE_IS_RIGHT[::2]), choose(SURE_IS_RIGHT[1::2])] == [0.35, 0.25]
    assert run["held_out"]["f1"] == 0.75  # the third question is as sure as the other half's threshold asks for
    assert run["held_out"]["chunks"] == 2.5
    (single,) = defer_overview({0: rows[0]})["runs"]
    assert single["held_out"] is None
