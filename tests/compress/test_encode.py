"""Encoding is nested, incremental and safe to interrupt; exact KV is deleted after its replacement was read back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.cache import writer as writers
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.lossless import Lossless
from kvtool.core.codec.transform import TransformCodec
from kvtool.core.compress import job
from kvtool.core.compress.job import _is_sound
from kvtool.core.errors import DamagedError
from kvtool.core.records.encode import encoder_threads
from tests.cli.working import QUESTION, SHORT, files_below, kvtool
from tests.compress.making import (
    LAYERS,
    check_sound,
    chunks_in,
    coded_in,
    damages,
    decoded,
    drop,
    flip,
    levels_in,
    prefix_of,
    refit,
    replace_record,
    rows,
    run,
    state_of,
)
from tests.wording import refused


def bases_in(path: Path, level: str) -> set[int]:
    return {coded.base for coded in coded_in(path, level).values()}


def profiles_in(path: Path, *chunks: str) -> set[str]:
    every = {(chunk, coded.profile.hex()) for level in NESTED for (chunk, _), coded in coded_in(path, level).items()}
    return {profile for chunk, profile in every if not chunks or chunk in chunks}


@pytest.mark.slow
def test_several_levels_at_once_are_nested(fitted: Path) -> None:
    assert [bases_in(fitted, level) for level in NESTED] == [{2}, {3}, {4}, {0}]
    check_sound(fitted)
    raw, lossy = (sum(len(data) for data in rows(fitted, level).values()) for level in ("raw", "1"))
    assert lossy < raw


@pytest.mark.slow
def test_one_after_the_other_is_as_at_once(fitted: Path) -> None:
    expected = {level: rows(fitted, level) for level in NESTED}
    chunk = chunks_in(fitted)[0]
    whole = {level: decoded(fitted, chunk, level) for level in NESTED}
    for level in NESTED:
        drop(fitted, level)
    for level in reversed(NESTED):
        assert run(fitted, level).encoded == len(chunks_in(fitted))
    assert {level: rows(fitted, level) for level in NESTED} == expected
    for level in NESTED:
        drop(fitted, level)
    for level in NESTED:
        run(fitted, level)
        assert bases_in(fitted, level) == {0}
    check_sound(fitted)
    for level, kv in whole.items():
        again = decoded(fitted, chunk, level)
        assert all(map(torch.equal, (*again.keys, *again.values), (*kv.keys, *kv.values)))


@pytest.mark.parametrize("profile", [False, True])
def test_second_run(profile: bool, plain: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fitted if profile else plain
    run(path, *NESTED, "lossless")
    before = files_below(path)
    monkeypatch.setattr(job, "encode_levels", None)
    report = run(path, *NESTED, "lossless")
    assert (report.encoded, report.kept, report.skipped) == (0, len(chunks_in(path)), 0)
    assert report.bytes_before == report.bytes_after
    assert all(level.chunks == report.kept and level.bytes for level in report.levels)
    assert files_below(path) == before


@pytest.mark.slow
def test_a_new_chunk_alone_is_encoded(fitted: Path, tmp_path: Path) -> None:
    count = len(chunks_in(fitted))
    (tmp_path / "new.md").write_text("A mill that nobody has seen, by a river that has no name.")
    kvtool("ingest", tmp_path / "new.md", "--store", fitted).fine()
    report = run(fitted, *NESTED)
    assert (report.encoded, report.kept) == (1, count)
    check_sound(fitted)


def breaking(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, after: int, error: BaseException) -> None:
    works, calls = getattr(place, name), [0]

    def call(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise error
        return works(*args, **more)

    monkeypatch.setattr(place, name, call)


@pytest.mark.some(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("keep_raw", [True, False])
def test_interrupted_run(error: BaseException, keep_raw: bool, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_AT_ONCE", 2)
    exact = {chunk: decoded(plain, chunk, "raw") for chunk in chunks_in(plain)}
    with monkeypatch.context() as patch:
        breaking(patch, job, "encode_levels", 5, error)
        with pytest.raises(type(error)):
            run(plain, "1", "2", keep_raw=keep_raw)
    done = ["1", "2", "raw"] if keep_raw else ["1", "2"]
    found = levels_in(plain)
    assert found.pop(prefix_of(plain)) == ["raw"]
    assert sorted(found.values()) == sorted([done] * 4 + [["raw"]] * (len(exact) - 4))
    check_sound(plain)
    report = run(plain, "1", "2", keep_raw=keep_raw)
    assert (report.encoded, report.kept) == (len(exact) - 4, 4)
    assert set(map(tuple, levels_in(plain).values())) == {tuple(done), ("raw",)}
    check_sound(plain)
    for chunk, kv in exact.items():
        keys = torch.stack([*kv.keys])
        assert float((torch.stack([*decoded(plain, chunk, "1").keys]) - keys).norm() / keys.norm()) < 0.3


@pytest.mark.parametrize("after", [1, 2, 5])
def test_what_refines_is_never_there_alone(after: int, fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in NESTED:
        drop(fitted, level)
    monkeypatch.setattr("kvtool.core.cache.writer.BATCH_SECONDS", -1.0)
    with monkeypatch.context() as patch:
        breaking(patch, writers.Writer, "put_chunk", after, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(fitted, "1", "2", "3")
    assert sum(len(levels) - 1 for levels in levels_in(fitted).values()) == after
    check_sound(fitted)
    run(fitted, "1")
    check_sound(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 5, 8])
def test_a_refit_that_is_interrupted(after: int, fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = state_of(fitted)["profile"]
    monkeypatch.setattr(job, "_AT_ONCE", 1)
    with monkeypatch.context() as patch:
        breaking(patch, writers.Writer, "commit", after, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            refit(fitted, "1", "2")
    check_sound(fitted)
    assert all("raw" in levels for levels in levels_in(fitted).values())
    refit(fitted, "1", "2")
    check_sound(fitted)
    assert profiles_in(fitted) == {state_of(fitted)["profile"]} != {old}


@pytest.mark.slow
def test_another_profile_takes_all_lossy_levels_of_a_chunk(fitted: Path) -> None:
    old, there = state_of(fitted)["profile"], levels_in(fitted)
    report = refit(fitted, "2")
    new = state_of(fitted)["profile"]
    assert new != old
    assert report.encoded == len(chunks_in(fitted))
    assert profiles_in(fitted) == {new}
    assert levels_in(fitted) == there
    assert bases_in(fitted, "2") == {3}
    check_sound(fitted)
    assert run(fitted, "2").encoded == 0


@pytest.mark.slow
def test_a_chunk_without_exact_records_keeps_its_old_profile(fitted: Path) -> None:
    old, (one, *others) = state_of(fitted)["profile"], chunks_in(fitted)
    before = {level: decoded(fitted, one, level) for level in NESTED}
    drop(fitted, "raw", one)
    report = refit(fitted, "1", "2")
    assert (report.encoded, report.kept, report.skipped) == (len(others), 0, 1)
    assert any("no exact record" in text for text in report.warnings)
    assert profiles_in(fitted, one) == {old}
    assert profiles_in(fitted, *others) == {state_of(fitted)["profile"]}
    for level, kv in before.items():
        assert all(map(torch.equal, decoded(fitted, one, level).keys, kv.keys))
    check_sound(fitted)
    row = kvtool("query", QUESTION, "--store", fitted, "--chunks", one, others[0], "--level", "2", *SHORT, "--json")
    assert {chunk["status"] for chunk in row.fine().json["chunks"]} <= {"hit", "exact"}


def test_lossless_records_leave_other_profiles_alone(fitted: Path) -> None:
    before = {level: rows(fitted, level) for level in NESTED}
    assert refit(fitted, "lossless").encoded == len(chunks_in(fitted))
    assert {level: rows(fitted, level) for level in NESTED} == before


@pytest.mark.some(1)
@pytest.mark.parametrize("hurt", ["base gone", "base damaged", "damaged"])
def test_what_cannot_be_read_is_encoded_again(hurt: str, fitted: Path) -> None:
    one, *others = chunks_in(fitted)
    there = set(levels_in(fitted)[one]) - ({"2"} if hurt == "base gone" else set())
    if hurt == "base gone":
        drop(fitted, "2", one)
    else:
        replace_record(fitted, one, "2" if hurt == "base damaged" else "1", 0, flip)
    report = run(fitted, "1")
    assert (report.encoded, report.kept) == (1, len(others))
    assert set(levels_in(fitted)[one]) == there
    check_sound(fitted)


@pytest.mark.slow
def test_damage_deep_inside_says_what_to_do(fitted: Path) -> None:
    one, two, *_ = chunks_in(fitted)
    replace_record(fitted, one, "1", LAYERS - 1, flip)
    replace_record(fitted, two, "2", LAYERS - 1, flip)
    with refused(DamagedError, numbers=True):
        run(fitted, "1", keep_raw=False)
    assert all("raw" in levels for levels in levels_in(fitted).values())
    kvtool("store", "verify", "--repair", "--store", fitted).fine()
    assert run(fitted, "1").encoded == 2
    check_sound(fitted)


def test_exact_records_go(fitted: Path) -> None:
    chunks = chunks_in(fitted)
    run(fitted, "lossless", chunks=tuple(chunks[:2]))
    report = run(fitted, "2", keep_raw=False)
    assert report.dropped == len(chunks) + 2
    assert report.bytes_after < report.bytes_before
    assert levels_in(fitted) == {chunk: list(NESTED) for chunk in chunks} | {prefix_of(fitted): ["raw"]}
    assert damages(fitted) == []
    again = run(fitted, "2", keep_raw=False)
    assert (again.encoded, again.kept, again.dropped) == (0, len(chunks), 0)


@pytest.mark.slow
def test_lossless_records_that_were_asked_for_stay(plain: Path) -> None:
    chunks = chunks_in(plain)
    exact = {chunk: decoded(plain, chunk, "raw") for chunk in chunks}
    report = run(plain, "lossless", keep_raw=False)
    assert (report.encoded, report.dropped) == (len(chunks), len(chunks))
    assert levels_in(plain) == {chunk: ["lossless"] for chunk in chunks} | {prefix_of(plain): ["raw"]}
    report = run(plain, "1", "lossless", keep_raw=False)  # from the lossless ones
    assert (report.encoded, report.dropped) == (len(chunks), 0)
    assert levels_in(plain)[chunks[0]] == ["1", "lossless"]
    for chunk, kv in exact.items():
        assert all(map(torch.equal, decoded(plain, chunk, "lossless").keys, kv.keys))
        assert all(map(torch.equal, decoded(plain, chunk, "lossless").values, kv.values))


def test_chunks_without_exact_records_are_skipped(plain: Path) -> None:
    """A chunk that `store prune` left without KV comes back by an ingest into the same store; a lossy one does not."""
    bare, _, *lossy = chunks_in(plain)
    run(plain, "2", keep_raw=False, chunks=tuple(lossy))
    drop(plain, "raw", bare)
    report = run(plain, "1", "2")
    assert (report.encoded, report.kept, report.skipped) == (1, 0, len(lossy) + 1)
    assert [(level.level, level.chunks) for level in report.levels] == [("1", 1), ("2", 1)]
    assert levels_in(plain)[lossy[0]] == ["2"]
    assert f"{len(lossy)} chunks stay as they are: no exact record" in " ".join(report.warnings)
    assert [text for text in report.warnings if "no KV is stored" in text and text.startswith("1 chunk")]
    assert not any("no exact record" in text for text in run(plain, "1", chunks=(bare,)).warnings)


def not_decoding(works: Callable[..., Any]) -> Callable[..., Any]:
    def decode(self: Any, items: Any, layer: int = 0, *more: Any) -> Any:
        if layer == 2:
            raise DamagedError("a compressed record that ends too early")
        return works(self, items, layer, *more)

    return decode


def changing(change: Callable[[torch.Tensor], object]) -> Callable[..., Any]:
    """A decoder whose values are wrong at the last layer."""

    def wrap(works: Callable[..., Any]) -> Callable[..., Any]:
        def decode(self: Any, items: Any, layer: int = 0, *more: Any) -> Any:
            out = [(keys.clone(), values.clone()) for keys, values in works(self, items, layer, *more)]
            if layer == LAYERS - 1:
                change(out[0][1])
            return out

        return decode

    return wrap


BROKEN = {
    "fails": not_decoding,
    "other numbers": changing(lambda values: values.mul_(1.6)),
    "zeros": changing(lambda values: values.zero_()),
    "tokens moved": changing(lambda values: values.copy_(values.roll(1, 1))),
    "no number": changing(lambda values: values[0, 0, 0].fill_(float("nan"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("level", ["1", "lossless"])
def test_broken_decoder(how: str, level: str, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {chunk: decoded(plain, chunk, "raw") for chunk in chunks_in(plain)}
    kind = TransformCodec if level == "1" else Lossless
    with monkeypatch.context() as patch:
        patch.setattr(kind, "decode", BROKEN[how](kind.decode))
        with pytest.raises(DamagedError):
            run(plain, level, keep_raw=False)
    assert all("raw" in levels for levels in levels_in(plain).values())
    for chunk, kv in before.items():
        assert all(map(torch.equal, decoded(plain, chunk, "raw").keys, kv.keys))
    check_sound(plain)


def test_a_single_bit_of_a_lossless_record_matters(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nudge(values: torch.Tensor) -> None:
        values[0, 0, 0] = torch.nextafter(values[0, 0, 0], torch.tensor(9e9, dtype=values.dtype))

    monkeypatch.setattr(Lossless, "decode", changing(nudge)(Lossless.decode))
    with refused(DamagedError):
        run(plain, "lossless", keep_raw=False)
    assert all("raw" in levels for levels in levels_in(plain).values())


def test_exact_records_go_only_when_the_others_are_durable(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process's view at the moment of dropping has the new records."""
    seen: list[tuple[str, set[tuple[str, ...]]]] = []
    works = writers.Writer.drop_level

    def drop_level(self: writers.Writer, chunk_ids: Any, level: str) -> int:
        chunks = list(chunk_ids)
        with Store.open(plain) as store:
            seen.append((level, {tuple(store.levels(chunk)) for chunk in chunks}))
        return works(self, chunks, level)

    monkeypatch.setattr(writers.Writer, "drop_level", drop_level)
    run(plain, "1", keep_raw=False)
    assert ("raw", {("1", "raw")}) in seen
    assert all("1" in levels for _, found in seen for levels in found)


def test_stated_error_and_shape() -> None:
    one, other = torch.ones(2, 5, 8), torch.full((2, 9, 8), 2.0)
    assert _is_sound((one * 1.01, one), (one, one), (0.0101, 0.0))
    assert not _is_sound((one * 1.01, one), (one, one), (0.0, 0.0))
    assert not _is_sound((other, other * 1.1), (other, other), (0.0, 0.09))
    for wrong in (one[:, :4], one[:, :, :4], one.double()):
        assert not _is_sound((wrong, one), (one, one), (9.0, 9.0))


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP there")
def test_their_products_take_one_thread_and_nobody_elses(threads: None) -> None:
    before = 2
    torch.set_num_threads(before)
    with encoder_threads() as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
    with encoder_threads() as later:
        assert later._max_workers == before
    assert torch.get_num_threads() == before
