"""A chunk whose records are missing or damaged is computed in place, said, and stored for the next time (law 8)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.record import Allocator
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import record_key
from kvtool.core.cache.tree import Snapshot
from kvtool.core.errors import DamagedError
from tests.cli.working import (
    CHUNKS,
    QUESTION,
    SHORT,
    Done,
    break_record,
    chunks_of,
    damages,
    drop_records,
    flip_row,
    kvtool,
    misshape,
    payloads,
    prefix_chunk,
    process,
    write_corpus,
)
from tests.compress.making import flip, levels_in, replace_record


def ask(store: Path, *more: object) -> Done:
    return kvtool("query", QUESTION, "--store", store, "--documents", "mill2.md", *SHORT, "--json", *more).fine()


@pytest.mark.parametrize("mode", ["full", "reuse", "epic", "prefix"])
def test_misses_are_told_by_reason(mode: str, store: Path) -> None:
    row = ask(store, "--fusion", mode, "--token-ids").json
    question = len(row["segments"]["question"])
    assert sum(row["reasons"].values()) == row["tokens"]["fresh"] - question
    assert (row["tokens"]["shifted"] > 0) == (mode == "epic")


def statuses(row: dict[str, Any]) -> list[str]:
    return [chunk["status"] for chunk in row["chunks"]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reuse", "epic", "blend"])
def test_a_hole_in_every_mode(mode: str, store: Path) -> None:
    before = payloads(store)
    whole = ask(store, "--fusion", mode).json
    chunk = chunks_of(store, "mill2.md")[2]
    break_record(store, chunk, 1)
    done = ask(store, "--fusion", mode)
    row = done.json
    assert statuses(row) == ["hit", "hit", "miss", *["hit"] * (len(row["chunks"]) - 3)]
    assert "damaged" in row["chunks"][2]["reason"]
    assert row["tokens"]["fresh"] == whole["tokens"]["fresh"] + row["chunks"][2]["tokens"]
    assert row["tokens"]["prompt"] == whole["tokens"]["prompt"]
    told = row["chunks"][2]["reason"]
    assert row["reasons"][told] == whole["reasons"].get(told, 0) + row["chunks"][2]["tokens"]
    assert f"warning: chunk {chunk[:12]} was computed in place: {row['chunks'][2]['reason']}" in done.err
    assert "hint: it is stored now, for the next question" in done.err
    assert payloads(store) == before  # as the ingest had it, bit for bit
    again = ask(store, "--fusion", mode)
    assert "warning" not in again.err
    assert again.json["chunks"] == whole["chunks"]
    assert again.json["tokens"] == whole["tokens"]
    assert again.json["answer"] == whole["answer"]
    assert damages(store) == []


@pytest.mark.slow
def test_levels_stay_where_nothing_exact_does(store: Path) -> None:
    """Of a compressed store one level is damaged: the chunk is computed, and what else there was of it is kept."""
    compress = ("compress", "--level", "cachegen-1", "--level", "cachegen-2", "--questions", "0")
    kvtool(*compress, "--drop-raw", "--yes", "--store", store).fine()
    chunk = chunks_of(store, "mill2.md")[1]
    replace_record(store, chunk, "cachegen-1", 0, flip)
    assert statuses(ask(store, "--level", "cachegen-1", "--fusion", "reuse").json)[1] == "miss"
    assert levels_in(store)[chunk] == ["cachegen-2", "raw"]
    assert damages(store) == []


def test_records_of_another_shape_are_made_anew(store: Path) -> None:
    """Their digests are right, so only the model shows it: a record that does not fit it is none of the chunk."""
    before, chunk = payloads(store), bytes.fromhex(chunks_of(store, "mill2.md")[2])
    misshape(store, chunk)
    assert "does not fit" in ask(store, "--fusion", "reuse").json["chunks"][2]["reason"]
    assert (payloads(store) == before) is True  # without a difference of megabytes to print
    assert set(statuses(ask(store, "--fusion", "reuse").json)) == {"hit"}


def test_full_needs_no_cache_and_fills_none(store: Path) -> None:
    chunk = chunks_of(store, "mill2.md")[2]
    whole = ask(store, "--fusion", "full").json
    drop_records(store, chunk)
    with Store.open(store) as opened:
        assert ask(store, "--fusion", "full").json["answer"] == whole["answer"]
        assert opened.levels(bytes.fromhex(chunk)) == []


def test_all_of_it_is_a_hole(store: Path) -> None:
    """Then every mode is plain prefill, and all is stored after the answer."""
    before = payloads(store)
    full = ask(store, "--fusion", "full").json
    drop_records(store, prefix_chunk(store), *chunks_of(store, "mill2.md"))
    row = ask(store, "--fusion", "reuse").json
    assert set(statuses(row)) == {"miss"}
    assert row["answer"] == full["answer"]
    assert row["bytes_read"] == 0
    assert row["tokens"]["fresh"] == row["tokens"]["prompt"]
    assert payloads(store) == before


def test_an_instruction_of_ones_own_is_told_by_what_it_is(store: Path) -> None:
    done = ask(store, "--fusion", "reuse", "--system", "Answer in one word.")
    assert "the prompt's beginning was computed in place: another instruction than the store's" in done.err


@pytest.mark.slow
def test_a_slow_record_is_computed_and_stays(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, chunk = payloads(store), chunks_of(store, "mill2.md")[1]
    whole = ask(store, "--fusion", "reuse").json
    copies, wanted = Snapshot.copies, record_key(bytes.fromhex(chunk), "raw", 1)

    def slowly(
        self: Snapshot, table: bytes, keys: Sequence[bytes], before: Callable[[int], None], room: Allocator
    ) -> list[memoryview | DamagedError | None]:
        def begun(number: int) -> None:
            before(number)
            time.sleep(2.5 if keys[number] == wanted else 0)

        return copies(self, table, keys, begun, room)

    monkeypatch.setattr(Snapshot, "copies", slowly)
    done = ask(store, "--fusion", "reuse", "--set", "load.timeout=1")
    assert statuses(done.json)[:3] == ["hit", "miss", "hit"]
    assert done.json["chunks"][1]["reason"] == "slow: not read within 1 s"
    assert f"chunk {chunk[:12]} was computed in place: slow" in done.err
    assert done.json["tokens"]["fresh"] == whole["tokens"]["fresh"] + whole["chunks"][1]["tokens"]
    assert payloads(store) == before
    monkeypatch.undo()
    assert ask(store, "--fusion", "reuse").json["chunks"] == whole["chunks"]


@pytest.mark.slow
def test_a_locked_store_is_answered_from_and_not_written(store: Path) -> None:
    chunk = chunks_of(store, "mill2.md")[0]
    break_record(store, chunk, 1)
    with Store.open(store) as held, held.writer():
        done = ask(store)
        assert statuses(done.json)[0] == "miss"
        assert "could not be stored" in done.err
    assert statuses(ask(store).json)[0] == "miss"  # now it is stored
    assert statuses(ask(store).json)[0] == "hit"


@pytest.mark.slow
def test_a_full_store_is_answered_from(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_record(store, chunks_of(store, "mill2.md")[0], 1)
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    done = ask(store)
    assert statuses(done.json)[0] == "miss"
    monkeypatch.delenv("KVTOOL_DISK_RESERVE")
    ask(store, "--compare", "reuse")  # which stores what has no KV
    assert statuses(ask(store).json)[0] == "hit"
    assert damages(store) == []


def test_compare_with_a_hole(store: Path) -> None:
    """The chunk is stored first, so that all modes of a comparison meet it."""
    drop_records(store, chunks_of(store, "mill2.md")[1])
    row = ask(store, "--compare", "reuse,epic,blend").json
    assert [run["chunks"][1]["status"] for run in row["runs"]] == ["hit"] * 4
    assert damages(store) == []


def test_a_dry_run_needs_no_lock(store: Path, corpus: Path) -> None:
    drop_records(store, chunks_of(store, "mill2.md")[1])
    with Store.open(store) as held, held.writer():
        report = kvtool("ingest", corpus, "--store", store, "--dry-run", "--json").fine().json
    assert (report["documents"]["changed"], report["chunks"]["computed"]) == (0, 1)


@pytest.mark.slow
def test_a_neighbour_store_is_filled_by_ingest(tiny: Path, tmp_path: Path) -> None:
    """A query does not know the chunk before; the next ingest does, though no file changed."""
    folder, path = write_corpus(tmp_path / "in", 3), tmp_path / "s"
    ingest = ("ingest", folder, "--store", path, "--model", tiny, "--json")
    kvtool(*ingest, *CHUNKS, "--lead-in", "neighbour").fine()
    before, chunk = payloads(path), chunks_of(path, "mill2.md")[2]
    drop_records(path, chunk)
    for _ in range(2):
        assert statuses(ask(path).json)[2] == "miss"
    assert kvtool(*ingest).fine().json["chunks"]["computed"] == 1
    assert payloads(path) == before
    assert statuses(ask(path).json)[2] == "hit"


FIELDS = ("answer", "chunks", "tokens", "bytes_read")


@pytest.mark.slow
def test_copied_and_moved_stores_answer_alike(store: Path, tmp_path: Path) -> None:
    """Law 6, one of the runs in another process."""
    args = ("query", QUESTION, *SHORT, "--json", "--store")
    expected = kvtool(*args, store).fine().json
    copy = Path(shutil.copytree(store, tmp_path / "deep" / "copy"))
    there = process(*args, copy).fine().json
    moved = kvtool(*args, store.rename(tmp_path / "moved")).fine().json
    for name in FIELDS:
        assert there[name] == moved[name] == expected[name]
    assert kvtool("store", "verify", "--store", tmp_path / "moved", "--json").fine().json["damaged"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reuse", "epic", "blend"])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_flipped_bit_in_a_record(mode: str, layer: int, store: Path, tmp_path: Path) -> None:
    """Law 8: answered as without that cache, said, and repaired."""
    args = ("query", QUESTION, "--documents", "mill2.md", "--fusion", mode, *SHORT, "--json", "--store")
    before, whole = payloads(store), kvtool(*args, store).fine().json
    without = Path(shutil.copytree(store, tmp_path / "without"))
    chunk = chunks_of(store, "mill2.md")[1]
    with Store.open(without) as opened, opened.writer() as writer:
        writer.drop_level([bytes.fromhex(chunk)], "raw")
    expected = kvtool(*args, without).fine().json
    break_record(store, chunk, layer)
    done = kvtool(*args, store).fine()
    row = done.json
    assert row["chunks"][1]["status"] == "miss"
    assert "damaged" in row["chunks"][1]["reason"]
    assert "warning: " in done.err
    assert row["answer"] == expected["answer"]
    assert row["tokens"] == expected["tokens"]
    assert row["tokens"]["fresh"] == whole["tokens"]["fresh"] + row["chunks"][1]["tokens"]
    again = kvtool(*args, store).fine()
    assert "warning" not in again.err
    assert again.json["chunks"] == whole["chunks"]
    assert payloads(store) == before
    assert damages(store) == []


def test_a_flipped_bit_in_the_prefix(store: Path) -> None:
    args = ("query", QUESTION, "--store", store, "--fusion", "reuse", *SHORT, "--json")
    before, whole = payloads(store), kvtool(*args).fine().json
    break_record(store, prefix_chunk(store), 2)
    done = kvtool(*args).fine()
    assert "damaged" in done.err
    assert done.json["answer"] == whole["answer"]
    assert kvtool(*args).fine().json["tokens"] == whole["tokens"]
    assert payloads(store) == before


@pytest.mark.slow
@pytest.mark.parametrize("table", ["chunks", "levels"])
def test_a_flipped_bit_in_a_description(table: str, store: Path) -> None:
    """The chunk's ids come from the document's text then."""
    args = ("query", QUESTION, "--documents", "mill2.md", "--store", store, "--fusion", "reuse", *SHORT, "--json")
    before, whole = payloads(store), kvtool(*args, "--token-ids").fine().json
    chunk = bytes.fromhex(chunks_of(store, "mill2.md")[1])
    if table == "chunks":
        flip_row(store, tables.CHUNKS, chunk)
    else:
        flip_row(store, tables.LEVELS, tables.level_key(chunk, "raw"))
    done = kvtool(*args, "--token-ids").fine()
    row = done.json
    assert row["chunks"][1]["status"] == "miss"
    assert row["chunks"][1]["reason"] in done.err
    assert row["segments"] == whole["segments"]
    assert kvtool(*args).fine().json["chunks"] == whole["chunks"]
    assert payloads(store) == before
    assert damages(store) == []


def test_a_flipped_bit_in_a_document_is_healed_by_repair_and_ingest(store: Path, corpus: Path) -> None:
    before = payloads(store)
    flip_row(store, tables.DOCUMENTS, tables.name_key(str(corpus / "mill2.md")))
    kvtool("store", "verify", "--repair", "--store", store).fine()
    report = kvtool("ingest", corpus, "--store", store, "--json").fine().json
    assert report["documents"]["changed"] == 1
    assert report["chunks"]["computed"] == 0
    assert payloads(store) == before
    assert damages(store) == []


def test_a_flipped_bit_in_the_manifest(store: Path, corpus: Path, tiny: Path) -> None:
    before = payloads(store)
    flip_row(store, tables.META, tables.MANIFEST_KEY)
    for args in (("query", QUESTION), ("ingest", corpus), ("inspect",)):
        kvtool(*args, "--store", store).failed(13, "the manifest of the store is damaged", "--repair")
    kvtool("store", "verify", "--repair", "--store", store).fine()
    kvtool("query", QUESTION, "--store", store).failed(10, "ingest")
    report = kvtool("ingest", corpus, "--store", store, "--model", tiny, *CHUNKS, "--json").fine().json
    assert report["chunks"]["computed"] == 0  # what it said is said again, and all records are still good
    assert payloads(store) == before
