"""The job of compression: its choice of chunks, profile and levels, and its report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.cache.record import decode_record
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import DEFAULT_LOSSY, NESTED
from kvtool.core.common.types import Events
from kvtool.core.compress import loss
from kvtool.core.compress.loss import Toll, tolls
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, UsageError
from kvtool.core.fusion.engine import Fused
from kvtool.core.ingest.job import create
from kvtool.core.ingest.options import IngestOptions
from tests.cli.working import files_below, kvtool
from tests.compress.making import (
    LAYERS,
    LOSSES,
    chunks_in,
    coded_in,
    damage_profile,
    damages,
    drop,
    drop_profile,
    error_of,
    fixed_losses,
    levels_in,
    losses_of,
    prefix_of,
    refit,
    rows,
    run,
    state_of,
)
from tests.wording import refused


def test_a_store_without_documents(tiny: Path, tmp_path: Path) -> None:
    create(tmp_path / "store", IngestOptions(model=str(tiny)))
    with refused(KvtoolError):
        run(tmp_path / "store")


@pytest.mark.slow
def test_the_first_time_a_profile_is_fitted(plain: Path) -> None:
    said: list[str] = []
    report = run(plain, events=Events(warn=lambda text, hint: said.append(f"{text}: {hint}")))
    chunks, digest = chunks_in(plain), state_of(plain)["profile"]
    assert [level.level for level in report.levels] == [DEFAULT_LOSSY]
    assert (report.encoded, report.kept, report.skipped) == (len(chunks), 0, 0)
    assert said == report.warnings == []
    assert report.fitted
    found = coded_in(plain, DEFAULT_LOSSY)
    assert set(found) == {(chunk, layer) for chunk in chunks for layer in range(LAYERS)}
    assert {coded.profile.hex() for coded in found.values()} == {digest}
    assert levels_in(plain) == {chunk: [DEFAULT_LOSSY, "raw"] for chunk in chunks} | {prefix_of(plain): ["raw"]}
    assert damages(plain) == []
    assert (run(plain, "3").fitted, state_of(plain)["profile"]) == (False, digest)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [("cachegen-2",), ("lossless",), ("cachegen-1", "cachegen-4")])
def test_what_needs_no_profile_fits_none(levels: tuple[str, ...], plain: Path) -> None:
    report = run(plain, *levels)
    assert report.encoded == len(chunks_in(plain))
    assert (report.profile, state_of(plain).get("profile")) == (None, None)
    assert run(plain, *levels).encoded == 0
    assert damages(plain) == []
    for chunk in chunks_in(plain):
        assert {*levels, "raw"} == {*levels_in(plain)[chunk]}
        assert all(error_of(plain, chunk, level) < 0.9 for level in levels)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [("1",), ("4", "2"), NESTED, ("lossless", "3")], ids=" ".join)
@pytest.mark.parametrize("profile", [False, True], ids=["no profile", "profile"])
def test_bits_are_of_all_that_is_stored(levels: tuple[str, ...], profile: bool, fitted: Path, plain: Path) -> None:
    path = fitted if profile else plain
    if profile:
        for level in NESTED:
            drop(path, level)
    with Store.open(path) as store:
        before = store.stats()["bytes"]
    report = run(path, *levels)
    with Store.open(path) as store:
        stats = store.stats()
    assert [level.level for level in report.levels] == sorted(levels, key=["lossless", *NESTED].index)
    assert report.bytes_before == before
    assert report.bytes_after == stats["bytes"]
    chunks = chunks_in(path)
    for level in report.levels:
        needed = [level.level]
        while level.level in NESTED and (base := next(iter(coded_in(path, needed[-1]).values())).base):
            needed.append(str(base))
        stored = {name: sum(len(data) for data in rows(path, name).values()) for name in needed}
        assert stored == {name: stats["levels"][name]["bytes"] for name in needed}
        elements = 0
        for (chunk, _), data in rows(path, level.level).items():
            header, payload = decode_record(bytes.fromhex(chunk), data)
            assert len(data) == len(payload) + 80
            elements += header.kv_heads * header.tokens * (header.head_dim_k + header.head_dim_v)
        row = level.to_json()
        assert (row["chunks"], row["bytes"]) == (len(chunks), sum(stored.values()))
        bits = 8 * sum(stored.values()) / elements
        assert row["bits_per_element"] == pytest.approx(bits, abs=1e-4)
        assert row["ratio_vs_16bit"] == pytest.approx(16 / bits, abs=1e-3)
        assert row["ratio_vs_8bit"] == pytest.approx(8 / bits, abs=1e-3)


@pytest.mark.slow
def test_errors_are_those_of_what_is_read(fitted: Path) -> None:
    report = run(fitted, *NESTED, "lossless")
    with Store.open(fitted) as store:
        tokens = {chunk: len(store.chunk_info(bytes.fromhex(chunk)).token_ids) for chunk in chunks_in(fitted)}
    found = {level.level: level.to_json()["relative_error"] for level in report.levels}
    for level, error in found.items():
        own = sum(error_of(fitted, chunk, level) * count for chunk, count in tokens.items()) / sum(tokens.values())
        assert error == pytest.approx(own, rel=1e-3, abs=1e-6)  # the report has six digits
    assert found["lossless"] == 0 < found["1"] < found["2"] < found["3"] < found["4"]


@pytest.mark.slow
def test_the_loss_is_measured_and_remembered(fitted: Path) -> None:
    report = run(fitted, *NESTED, questions=2)
    lost = [level.to_json()["kl_answer"] for level in report.levels]
    assert lost[0] > 0
    assert lost == sorted(set(lost))
    assert all(level.to_json()["questions"] == 2 for level in report.levels)
    assert all(0 < level.to_json()["top1_agrees"] <= 1 for level in report.levels)
    kept = state_of(fitted)
    assert kept["losses"] == {kept["profile"]: {level.level: level.loss for level in report.levels}}


@pytest.mark.slow
def test_what_is_known_is_not_measured_again(fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fixed_losses(monkeypatch)
    run(fitted, "2", questions=1)
    run(fitted, "2", "3", questions=1)
    report = run(fitted, "3", "2", questions=1)
    assert asked == [["2"], ["3"]]
    assert [level.to_json()["kl_answer"] for level in report.levels] == [LOSSES["2"], LOSSES["3"]]


def test_a_loss_that_cannot_be_measured_again_stays(fitted: Path) -> None:
    run(fitted, "2", questions=0, keep_raw=False)
    with Store.open(fitted) as store, store.writer() as writer:
        profile = store.codec_state()["profile"]
        writer.set_codec_state(store.codec_state() | {"losses": {profile: {"2": {"kl_answer": 0.25}}}})
    assert run(fitted, "2", questions=1).warnings == []
    assert losses_of(fitted, chunks_in(fitted)[0]) == {"2": 0.25}


def test_a_loss_is_that_of_the_default_mode(fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = list[Fused]()
    real = loss.fuse

    def fuse(*given: Any, **more: Any) -> Fused:
        fused.append(real(*given, **more))
        return fused[-1]

    monkeypatch.setattr(loss, "fuse", fuse)
    run(fitted, "2", questions=1)
    assert len(fused) == 2
    for one in fused:
        context = one.plan.context_tokens
        assert one.tokens.recomputed == ceil(0.15 * context) > 0
        assert all(segment.source.sensitivity for segment in one.plan.chunks)


@pytest.mark.slow
def test_losses_belong_to_a_profile(fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new profile, for one chunk only, says nothing of the records that an older one made."""
    asked = fixed_losses(monkeypatch)
    run(fitted, "1", "2", questions=1)
    one, *others = chunks_in(fitted)
    fixed_losses(monkeypatch, {"2": 1e-6})
    refit(fitted, "2", questions=1, chunks=(one,))
    assert asked == [["1", "2"]]
    assert {chunk: losses_of(fitted, chunk) for chunk in (one, *others)} == {
        one: {"2": 1e-6},
        **{other: {"1": LOSSES["1"], "2": LOSSES["2"]} for other in others},
    }
    assert {
        row["level"]: row["kl_answer"]
        for row in kvtool("inspect", "--store", fitted, "--json").fine().json["levels"]
        if "kl_answer" in row
    } == {"2": LOSSES["2"]}


@pytest.mark.slow
def test_fit_keeps_a_profile_that_records_name(plain: Path) -> None:
    untransformed = run(plain, *(f"cachegen-{level}" for level in NESTED), questions=2)
    report = run(plain, *NESTED, fit=True, fit_prompts=12, questions=2)
    assert report.warnings == []
    assert report.profile is not None
    digest = bytes.fromhex(report.profile["digest"])
    with Store.open(plain) as store:
        data = store.profile(digest)
        assert store.stats()["profiles"]["count"] == 1
    assert report.profile["bytes"] == len(data)
    assert state_of(plain)["profile"] == digest.hex()
    for level in NESTED:
        assert {coded.profile for coded in coded_in(plain, level).values()} == {digest}
    plains, fitted = ([(row.to_json()["bits_per_element"], row.loss["kl_answer"]) for row in one.levels]
                      for one in (untransformed, report))  # fmt: skip
    assert any(bits < others and lost < lose for bits, lost in fitted for others, lose in plains)
    assert not any(others < bits and lose < lost for bits, lost in fitted for others, lose in plains)


def test_without_exact_records(fitted: Path) -> None:
    drop(fitted, "raw")
    before = state_of(fitted)
    with refused(KvtoolError):
        run(fitted, "1", fit=True)
    assert state_of(fitted) == before
    drop(fitted, "raw")
    before = levels_in(fitted)
    report = run(fitted, "auto", questions=1)
    assert [level.level for level in report.levels] == ["lossless"]
    assert report.skipped == len(chunks_in(fitted))
    assert levels_in(fitted) == before
    assert any("no exact record is left to measure" in text for text in report.warnings)


def test_profiles_of_stores(fitted: Path, plain: Path) -> None:
    assert run(fitted, "2", profile=fitted).encoded == 0
    digest, before = state_of(fitted)["profile"], files_below(fitted)
    report = run(plain, "2", profile=fitted)
    assert files_below(fitted) == before
    shutil.rmtree(fitted)
    assert report.profile is not None
    assert report.profile["digest"] == state_of(plain)["profile"] == digest
    assert {coded.profile.hex() for coded in coded_in(plain, "2").values()} == {digest}
    assert all(error_of(plain, chunk, "2") < 0.1 for chunk in chunks_in(plain))


@pytest.mark.parametrize("lose", [drop_profile, damage_profile])
def test_a_lost_profile_is_an_error_until_it_is_had_again(lose: Callable[[Path], None], fitted: Path) -> None:
    other = Path(shutil.copytree(fitted, fitted.with_name("other")))
    digest, chunk = state_of(fitted)["profile"], chunks_in(fitted)[0]
    lose(fitted)
    with refused(DamagedError):
        run(fitted, "1")
    report = run(fitted, "1", profile=other)
    assert state_of(fitted)["profile"] == digest
    assert report.encoded == 0
    assert error_of(fitted, chunk, "4") < 0.5
    assert damages(fitted) == []


@pytest.mark.slow
def test_fitting_again_changes_nothing(fitted: Path) -> None:
    before = files_below(fitted)
    assert run(fitted, *NESTED, fit=True).encoded == 0
    assert files_below(fitted) == before


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("bound", "chosen"),
    [(None, "2"), (0.0005, "lossless"), (0.001, "1"), (0.0039, "1"), (0.004, "2"), (0.03, "3"), (1.0, "4")],
)
def test_auto(bound: float | None, chosen: str, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_losses(monkeypatch)
    asked = ("auto",) if bound in (None, 0.004) else ()
    report = run(plain, *asked, max_loss=bound, questions=1, chunks=tuple(chunks_in(plain)[:1]))
    assert [level.level for level in report.levels] == [chosen]
    assert any("no level loses as little" in text for text in report.warnings) == (chosen == "lossless")


@pytest.mark.slow
def test_auto_beside_others(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_losses(monkeypatch)
    report = run(plain, "1", "auto", "2", questions=1, chunks=tuple(chunks_in(plain)[:1]))
    assert [level.level for level in report.levels] == ["1", "2"]


@pytest.mark.slow
def test_only_these_chunks(plain: Path) -> None:
    one, two, *others = chunks_in(plain)
    report = run(plain, "2", chunks=(two, one[:8].upper(), one))
    assert (report.encoded, report.kept, report.levels[0].chunks) == (2, 0, 2)
    found = levels_in(plain)
    assert found[one] == found[two] == ["2", "raw"]
    assert all(found[chunk] == ["raw"] for chunk in (*others, prefix_of(plain)))
    run(plain, "2", chunks=(one,), keep_raw=False)
    assert levels_in(plain) == found | {one: ["2"]}


def test_dropping_raw_spends_the_disks_reserve(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    with refused(NoSpaceError):
        run(plain, "cachegen-3")
    report = run(plain, "cachegen-3", keep_raw=False)
    assert report.freed > 0
    assert not report.warnings or all("as long as before" not in text for text in report.warnings)


def test_chunks_that_there_are_not(plain: Path) -> None:
    one = chunks_in(plain)[0]
    for text in ("00" * 20, one[:5], "", "no hex", prefix_of(plain), one + "00"):
        with refused(UsageError):
            run(plain, "1", chunks=(one, text))
    assert set(map(tuple, levels_in(plain).values())) == {("raw",)}


def test_a_layers_toll_by_hand() -> None:
    keys, values = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]])
    one, other = tolls([(keys, values)] * 2, [(keys + 1, values), (keys, values * 3)], [3, 1], keys.shape[1])
    assert one.to_json() == {
        "bits_per_element": 6.0,
        "k_relative_error": pytest.approx((2 / 25) ** 0.5),
        "v_relative_error": 0.0,
    }
    both = Toll() + one + other
    assert (both.bytes, both.elements) == (4, 8)
    assert both.to_json()["k_relative_error"] == pytest.approx((2 / 50) ** 0.5)
    assert both.to_json()["v_relative_error"] == pytest.approx((4 / 2) ** 0.5)

    assert Toll().to_json() == {"bits_per_element": 0.0, "k_relative_error": 0.0, "v_relative_error": 0.0}
