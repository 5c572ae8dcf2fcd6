"""`kvtool compress`: its JSON (`kvtool help json`), its exit codes, its forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvtool as kvtool_package
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import MAX_LOSS, NESTED
from kvtool.core.common.text import shown_size
from kvtool.core.errors import UsageError
from tests.cli.working import (
    CHUNKS,
    PREFIX,
    SHORT,
    damages,
    files_below,
    kvtool,
    process,
)
from tests.compress.making import (
    LOSSES,
    chunks_in,
    drop_profile,
    fixed_losses,
    levels_in,
    make_plain,
    state_of,
)
from tests.families import save_tiny
from tests.wording import refused


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_losses(monkeypatch)


FAST = ("--questions", "0", "--fit-prompts", "4")  # the loss is most of the time
NUMBERS = ("bytes", "bits_per_element", "ratio_vs_16bit", "ratio_vs_8bit", "relative_error", "kl_answer", "kl_first")


def stats(path: Path) -> dict[str, Any]:
    with Store.open(path) as store:
        return store.stats()


def test_fit_and_several_levels(plain: Path) -> None:
    before = stats(plain)
    done = kvtool("compress", "--store", plain, "--fit", "--level", *NESTED, "--questions", "2", "--json").fine()
    row = done.json
    assert done.err == ""
    after = stats(plain)
    assert [level["level"] for level in row["levels"]] == list(NESTED)
    for level in row["levels"]:
        assert all(level[name] >= 0 for name in NUMBERS)
        assert level["ratio_vs_16bit"] == pytest.approx(16 / level["bits_per_element"], abs=2e-3)
        assert level["bytes"] >= after["levels"][level["level"]]["bytes"]
        assert 0 < level["top1_agrees"] <= 1
    assert (row["bytes_before"], row["bytes_after"], row["warnings"]) == (before["bytes"], after["bytes"], [])
    bits = [level["bits_per_element"] for level in row["levels"]]
    assert bits == sorted(bits, reverse=True)
    assert row["chunks"] == {"encoded": len(chunks_in(plain)), "unchanged": 0, "skipped": 0, "exact_dropped": 0}
    assert row["encode_gb_per_s"] is not None
    assert row["decode_gb_per_s"] is not None
    assert row["profile"]["digest"] == state_of(plain)["profile"]
    assert row["profile"]["chunks"] == len(chunks_in(plain))
    assert damages(plain) == []


@pytest.mark.parametrize(
    "args",
    [
        *(("--level", level) for level in ("raw", "5", "0", "-1", "fine")),
        ("--level", "1", "--level", "raw"),
        ("--level", "auto", "--questions", "0"),
        ("--max-loss", "0.1", "--questions", "0"),
        *(("--max-loss", "-1"), ("--max-loss", "little"), ("--questions", "-1")),
        ("--fit", "--profile", "nowhere"),
        *(("--chunks", "00" * 20), ("--chunks", "no hex"), ("more",)),
    ],
    ids=" ".join,
)
def test_2_usage(args: tuple[str, ...], plain: Path, form: Any) -> None:
    before = files_below(plain)
    kvtool("compress", "--store", plain, *args, *form).failed(2)
    assert files_below(plain) == before


def test_what_fails_has_a_code(
    plain: Path, fitted: Path, tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, nowhere = save_tiny("llama", tmp_path / "other", seed=1), tmp_path / "nowhere"
    foreign = make_plain(other, tmp_path, 1, 1)
    Store.create_or_open(tmp_path / "empty").close()
    for path, given, code, said in (
        (nowhere, (), 10, "no store at"),
        (tmp_path / "empty", (), 10, "is empty"),
        (plain, ("--profile", nowhere), 10, "no store at"),
        (plain, ("--fit", "--model", other), 12, "another model"),
        (foreign, ("--profile", fitted), 12, "another model's"),
        (fitted, ("--profile", plain), 1, "has no profile"),
    ):
        kvtool("compress", "--store", path, *given, *FAST, *form).failed(code, said)
    assert not nowhere.exists()
    at = ("compress", "--store", plain, *FAST, *form)
    with Store.open(plain) as held, held.writer():
        kvtool(*at, "--lock-wait", "0").failed(11)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "read_only", True)
        kvtool(*at).failed(1, "read-only")
    assert set(map(tuple, levels_in(plain).values())) == {("raw",)}
    drop_profile(fitted)
    kvtool("compress", "--store", fitted, *FAST, *form).failed(13, "is not in the store", "--fit")


@pytest.mark.slow
def test_the_last_line_tells_what_the_exact_records_take(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_losses(monkeypatch)
    at = ("compress", "--store", plain, "--level", "2")
    before = shown_size(stats(plain)["file_bytes"])
    grown = kvtool(*at).fine().out.splitlines()[-1]
    after = shown_size(stats(plain)["file_bytes"])
    row = kvtool(*at, "--json").fine().json
    without = shown_size(row["file_bytes_without_exact"])
    loss = "loss 0.0040 of at most 0.01 nats a token"
    assert grown == f"{after} (was {before}; {without} without the exact records: --drop-raw); {loss}"
    assert (row["loss"], row["max_loss"]) == (LOSSES["2"], MAX_LOSS)
    dropped = kvtool(*at, "--drop-raw").fine().out.splitlines()[-1]
    assert dropped == f"{shown_size(stats(plain)['file_bytes'])} (was {after}); {loss}"
    assert row["file_bytes_without_exact"] == pytest.approx(stats(plain)["file_bytes"], rel=0.1)
    assert kvtool(*at, "--drop-raw", "--json").fine().json["file_bytes_without_exact"] is None


@pytest.mark.usefixtures("fixed")
def test_2_more_is_lost_than_is_allowed(plain: Path, form: Any) -> None:
    at = ("compress", "--store", plain, *form)
    kvtool(*at, "--level", "3").fine()
    before = levels_in(plain)
    for coarse in (("--level", "3"), ("--level", "3", "4"), ("--level", "2", "--max-loss", "0.001")):
        kvtool(*at, *coarse, "--drop-raw").failed(2, "exact records stay", "--max-loss 0.0")
        assert levels_in(plain) == before
    one, two, three, *_ = chunks_in(plain)
    for chunk, words in ((one, ("3", "--max-loss", "0.02")), (two, ("3", "1")), (three, ("3", "--yes"))):
        kvtool(*at, "--level", *words, "--drop-raw", "--chunks", chunk).fine()
        assert "raw" not in levels_in(plain)[chunk]


@pytest.mark.slow
@pytest.mark.usefixtures("fixed")
def test_what_questions_may_lose_is_what_dropping_may(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("compress", "--store", plain, "--level", "3", "--drop-raw")
    kvtool(*at).failed(2, "of at most 0.01")
    monkeypatch.setenv("KVTOOL_SET", "load.max_loss=0.05")
    done = kvtool(*at).fine()
    assert "loss 0.0200 of at most 0.05" in done.out
    assert "questions allow" not in done.err


@pytest.mark.slow
def test_2_what_was_not_measured_is_not_dropped_for(plain: Path, form: Any) -> None:
    at = ("compress", "--store", plain, "--level", "2", "--drop-raw", *form)
    before = levels_in(plain)
    kvtool(*at, *FAST).failed(2, "is not measured", "without --questions 0")
    assert levels_in(plain) == before
    kvtool(*at, *FAST, "--yes").fine()
    kvtool(*at, *FAST).fine()  # nothing is left to drop
    other = kvtool("compress", "--store", plain, "--level", "1", *FAST).fine()
    assert other.out.endswith("; no chunk is stored at 1\n")


@pytest.mark.slow
def test_from_python_the_limit_is_the_same(plain: Path) -> None:
    with kvtool_package.open(plain, warn=lambda text, hint: None) as cache:
        with refused(UsageError):
            cache.compress("2", keep_raw=False, questions=0)
        assert cache.compress("2", keep_raw=False, questions=0, yes=True).dropped == len(chunks_in(plain))


@pytest.mark.slow
def test_a_profile_that_takes_more_than_it_saves_is_told(plain: Path) -> None:
    at = ("compress", "--store", plain, "--chunks", chunks_in(plain)[0], *FAST)
    assert "it pays in a larger store" in kvtool(*at).fine().err
    assert "it pays in a larger store" not in kvtool(*at).fine().err


@pytest.mark.slow
def test_nobody_is_told_to_give_up_what_questions_read(plain: Path) -> None:
    """Rows that --keep leaves out are nowhere else."""
    kept = kvtool("compress", "--store", plain, "--keep", "0.5", *FAST).fine().err
    assert "--drop-raw would give them up, and for good the rows that were left out here" in kept
    dropped = kvtool("compress", "--store", plain, "--keep", "0.5", "--drop-raw", "--yes", *FAST).fine().err
    assert "the rows that were left out with them" in dropped


@pytest.mark.slow
def test_a_level_that_loses_too_much_gives_no_reason_to_drop(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_losses(monkeypatch)
    coarse = kvtool("compress", "--store", plain, "--level", "3").fine().err
    assert "exact records stay, and questions go on reading them" in coarse
    assert "--drop-raw" not in coarse


@pytest.mark.slow
def test_who_makes_a_level_that_questions_pass_over_is_told(fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_losses(monkeypatch)
    said = kvtool("compress", "--store", fitted, "--level", "2", "3").fine().err
    assert said.count("that questions allow") == 1
    assert "`--level 3` or `--set load.max_loss=0.02` reads it" in said


@pytest.mark.slow
def test_any_script(tiny: Path, tmp_path: Path) -> None:
    """Names of the store, of the corpus and in the corpus; in a process of its own, with its own streams."""
    folder, path = tmp_path / "말뭉치", tmp_path / "창고 ☃ é"
    folder.mkdir()
    (folder / "방앗간.txt").write_text("강가의 첫 방앗간은 누가 지었는가? 빵을 굽는 사람이 1874년에 지었다.", "utf-8")
    kvtool("ingest", folder, "--store", path, "--model", tiny, *CHUNKS, *PREFIX).fine()
    row = kvtool("compress", "--store", path, "--fit", "--level", "2", "--questions", "1", "--json").fine().json
    assert row["chunks"]["encoded"] == len(chunks_in(path))
    done = process("compress", "--store", path, "--drop-raw", "--yes", "--level", "2", *FAST, "--json").fine()
    assert done.json["chunks"]["exact_dropped"] == len(chunks_in(path))
    kvtool("query", "방앗간은 누가 지었는가?", "--store", path, *SHORT).fine()
    wrong = kvtool("compress", "--store", tmp_path / "없는 곳", "--json").failed(10, "없는 곳")
    assert "없는 곳" in json.loads(wrong.out)["error"]["message"]
