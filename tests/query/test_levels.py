"""Levels through the commands: stored at once, read back, said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.query import prompt
from kvtool.core.records import read
from tests.cli.working import (
    CHUNKS,
    LAYERS,
    PREFIX,
    QUESTION,
    SHORT,
    Done,
    chunks_of,
    damages,
    files_below,
    flip_row,
    kvtool,
    payloads,
    write_corpus,
)
from tests.compress.making import (
    damage_profile,
    drop,
    drop_profile,
    flip,
    levels_in,
    prefix_of,
    replace_record,
    rows,
    spoil,
)


@pytest.fixture(scope="module")
def both(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("levels")
    write_corpus(folder / "in")
    for level in ("raw", "lossless"):
        at = ("--store", folder / level, "--model", tiny, *CHUNKS, *PREFIX)
        kvtool("ingest", folder / "in", *at, "--level", level).fine()
    return folder / "raw", folder / "lossless"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reuse", "epic", "blend", "prefix"])
def test_lossless_answers_as_raw_does(mode: str, both: tuple[Path, Path]) -> None:
    rows = [kvtool("query", QUESTION, "--store", path, "--fusion", mode, *SHORT, "--json").fine().json for path in both]
    assert rows[0]["answer"] == rows[1]["answer"]
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert 0 < rows[1]["bytes_read"] < rows[0]["bytes_read"]


@pytest.mark.parametrize(("asked", "stored"), [("lossless", "raw"), ("raw", "lossless")])
def test_a_level_that_is_not_stored_is_computed_and_said(
    asked: str, stored: str, both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is stored stays as it is; nothing is prefilled for the store."""
    monkeypatch.setattr(read, "make", None)
    path = both[stored == "lossless"]
    before = files_below(path)
    done = kvtool("query", QUESTION, "--store", path, "--level", asked, *SHORT, "--json").fine()
    assert "was computed in place" in done.err
    assert {chunk["status"] for chunk in done.json["chunks"]} == {"miss"}
    assert {chunk["reason"] for chunk in done.json["chunks"]} == {f"not stored at level {asked}"}
    assert files_below(path) == before


def test_a_payload_that_cannot_be_decoded_is_a_hole(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Its digest is right, so only the codec can detect it."""
    path = Path(shutil.copytree(both[1], tmp_path / "store"))
    spoil(path, chunks_of(path, "mill2.md")[1], "lossless", 2, at=0)
    at = ("--store", path, "--documents", "mill2.md", *SHORT, "--json")
    row = kvtool("query", QUESTION, *at).fine().json
    assert [chunk["status"] for chunk in row["chunks"]][:3] == ["exact", "miss", "hit"]
    assert "damaged" in row["chunks"][1]["reason"]
    again = kvtool("query", QUESTION, *at).fine().json  # stored again, as raw
    assert "miss" not in {chunk["status"] for chunk in again["chunks"]}
    assert again["answer"] == row["answer"]


def know(path: Path, **losses: float) -> None:
    with Store.open(path) as store, store.writer() as writer:
        rows = {name[1:]: {"kl_answer": loss} for name, loss in losses.items()}
        state = store.codec_state()
        writer.set_codec_state(state | {"losses": {state["profile"]: rows}})


def ask(path: Path, *args: object) -> Done:
    """One document's chunks, nothing computed again: every byte of them is read."""
    return kvtool("query", "Where?", "--store", path, "--documents", "mill0.md", "--fusion", "reuse",
                  *SHORT, *args, "--json").fine()  # fmt: skip


def statuses(done: Done) -> set[str]:
    return {chunk["status"] for chunk in done.json["chunks"]}


def payload_bytes(path: Path, *levels: str) -> int:
    """Bytes of the document's records at these levels, and of the prompt's beginning."""
    wanted = [(chunk, level) for chunk in chunks_of(path, "mill0.md") for level in levels]
    wanted.append((prefix_of(path), "raw"))
    return sum(len(rows(path, level)[chunk, layer]) - 80 for chunk, level in wanted for layer in range(LAYERS))


@pytest.mark.slow
@pytest.mark.parametrize(("level", "read"), [("raw", "raw"), ("4", "4"), ("3", "34"), ("2", "234"), ("1", "1234")])
def test_a_level_is_read_with_what_it_refines(level: str, read: str, fitted: Path) -> None:
    done = ask(fitted, "--level", level)
    assert statuses(done) <= {"hit", "exact"}
    assert done.json["bytes_read"] == payload_bytes(fitted, *([read] if level == "raw" else read))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "read"),
    [
        ({}, "raw"),  # nothing is known
        ({"l1": 0.001, "l2": 0.002, "l3": 0.005, "l4": 0.01}, "4"),
        ({"l1": 0.001, "l2": 0.002, "l3": 0.005, "l4": 0.0101}, "34"),
        ({"l1": 0.001, "l2": 0.2, "l3": 0.5, "l4": 0.9}, "1234"),
        ({"l1": 0.1, "l2": 0.2, "l3": 0.5, "l4": 0.9}, "raw"),
    ],
)
def test_auto_reads_the_smallest_that_loses_little_enough(losses: dict[str, float], read: str, fitted: Path) -> None:
    """The prompt's own beginning is read exactly whatever is known."""
    know(fitted, **losses)
    done = ask(fitted)
    assert done.err.count("computed in place") == 0
    assert done.json["bytes_read"] == payload_bytes(fitted, *([read] if read == "raw" else read))
    exact = ask(fitted, "--level", "raw").json
    assert (done.json["bytes_read"] < exact["bytes_read"]) == (read != "raw")


@pytest.mark.slow
def test_auto_without_anything_exact_reads_what_loses_least(fitted: Path) -> None:
    know(fitted, l1=0.1, l2=0.2, l3=0.3, l4=0.4)
    for level in ("raw", "1"):
        drop(fitted, level)
    done = ask(fitted)
    assert done.json["bytes_read"] == payload_bytes(fitted, "2", "3", "4")
    assert done.err.count("read at level 2, which loses 0.2 nats a token") == 1  # of several chunks
    assert "read at level" not in ask(fitted, "--set", "load.max_loss=0.2").err
    assert "read at level" not in ask(fitted, "--level", "2").err


def test_mixed_stores_are_normal(fitted: Path) -> None:
    """Raw here, lossy there, lossless and both elsewhere: no hole, and about the same answer."""
    know(fitted, l1=0.001, l2=0.002, l3=0.5, l4=0.9)
    one, two, three, *_ = chunks = chunks_of(fitted, "mill0.md")
    kvtool("compress", "--store", fitted, "--level", "lossless", "--chunks", three, "--questions", "0").fine()
    with Store.open(fitted) as store, store.writer() as writer:
        for chunk, levels in ((one, "1234"), (two, ["raw", "1"]), (three, ["raw", *"1234"])):
            for level in levels:
                writer.drop_level([bytes.fromhex(chunk)], level)
    found = levels_in(fitted)
    assert (found[one], found[two], found[three]) == (["raw"], ["2", "3", "4"], ["lossless"])
    done = ask(fitted)
    assert statuses(done) <= {"hit", "exact"}
    wanted = dict.fromkeys(chunks, "234") | {one: ["raw"], three: ["lossless"], prefix_of(fitted): ["raw"]}
    read = [rows(fitted, level)[chunk, layer] for chunk in wanted for level in wanted[chunk] for layer in range(LAYERS)]
    assert done.json["bytes_read"] == sum(len(record) - 80 for record in read)
    assert damages(fitted) == []


@pytest.mark.slow
def test_auto_says_why_nothing_stored_serves(fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "smallest_allowed", lambda *_: None)  # as if all lost more
    gone = chunks_of(fitted, "mill0.md")[1]
    with Store.open(fitted) as store:
        levels = store.levels(bytes.fromhex(gone))
    for level in levels:
        drop(fitted, level, gone)
    reasons = [chunk["reason"] for chunk in ask(fitted, "--set", "load.max_loss=0.02").json["chunks"]][:2]
    assert reasons == ["no stored level is known to lose at most 0.02 nats a token", "not stored yet"]


@pytest.mark.slow
@pytest.mark.parametrize("hurt", ["gone", "damaged", "not a payload", "not these numbers"])
@pytest.mark.parametrize("level", ["2", "4"])
def test_a_damaged_base_is_a_hole_of_its_chunk_alone(hurt: str, level: str, fitted: Path) -> None:
    """Answered as if it were missing; it is removed, and what refines it; the exact record serves the next time."""
    know(fitted, l1=0.001, l2=0.5, l3=0.5, l4=0.5)
    one, two, *others = chunks_of(fitted, "mill0.md")
    sound = ask(fitted, "--level", "raw").json
    if hurt == "gone":
        drop(fitted, level, two)
    elif hurt == "damaged":
        replace_record(fitted, two, level, LAYERS - 1, flip)
    else:
        spoil(fitted, two, level, LAYERS - 1, at=0 if hurt == "not a payload" else 200)
    done = ask(fitted)
    assert {chunk["id"] for chunk in done.json["chunks"] if chunk["status"] == "miss"} == {two}
    assert ("not stored" if hurt == "gone" else "damaged") in done.json["chunks"][1]["reason"]
    assert done.err.count("was computed in place") == 1
    assert levels_in(fitted)[two] == [*(coarser for coarser in "34" if coarser > level), "raw"]
    assert all("1" in levels_in(fitted)[chunk] for chunk in (one, *others))
    again = ask(fitted)
    assert statuses(again) <= {"hit", "exact"}
    assert damages(fitted) == []
    assert ask(fitted, "--level", "raw").json["answer"] == sound["answer"]


@pytest.mark.slow
@pytest.mark.parametrize("lose", [drop_profile, damage_profile])
def test_without_their_profile_lossy_records_are_holes(lose: Callable[[Path], None], fitted: Path) -> None:
    know(fitted, l4=0.001)
    lose(fitted)
    done = ask(fitted)
    assert statuses(done) == {"miss"}
    assert all("profile" in chunk["reason"] for chunk in done.json["chunks"])
    assert {tuple(levels_in(fitted)[chunk]) for chunk in chunks_of(fitted, "mill0.md")} == {("raw",)}
    assert statuses(ask(fitted)) <= {"hit", "exact"}


def test_a_damaged_state_of_the_codec_stops_no_query(fitted: Path) -> None:
    know(fitted, l4=0.001)
    flip_row(fitted, tables.META, tables.CODEC_KEY)
    done = ask(fitted)
    assert statuses(done) <= {"hit", "exact"}
    assert done.json["bytes_read"] == payload_bytes(fitted, "raw")


def test_a_lossy_record_is_never_exact(fitted: Path) -> None:
    """Right after its own lead-in it is still not what full prefill gives, so the modes may recompute it."""
    done = ask(fitted, "--level", "2")
    assert "exact" not in statuses(done)


def test_what_is_exact_and_sound_is_not_computed_again(fitted: Path) -> None:
    """A damaged lossy record costs nothing but itself and what refines it: the exact rows stay, byte for byte."""
    know(fitted, l1=0.5, l2=0.001, l3=0.5, l4=0.5)
    one = chunks_of(fitted, "mill0.md")[0]
    before = payloads(fitted)
    replace_record(fitted, one, "2", 0, flip)
    assert "miss" in statuses(ask(fitted))
    assert levels_in(fitted)[one] == ["3", "4", "raw"]
    assert payloads(fitted) == before
