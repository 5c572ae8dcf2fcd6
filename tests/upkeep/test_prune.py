"""`store prune`, `compact`, `budget` and `pin` on stores: bytes on disk, what stays, what a question answers then."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.core.cache import layout, tables
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry
from kvtool.core.cache.identity import Origin
from kvtool.core.cache.integrity import verify
from kvtool.core.cache.side_files import append
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import StretchInfo, meta_row
from kvtool.core.codec.levels import NESTED
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import NoSpaceError, UsageError
from kvtool.core.upkeep.forget import pin, unpin
from kvtool.core.upkeep.options import PruneOptions
from kvtool.core.upkeep.prune import PruneReport, compact, keep_budget, prune
from tests.cli.working import QUESTION, SHORT, damages, emptied, kvtool, prefix_chunk
from tests.compress.making import chunks_in, levels_in, refit, replace_record
from tests.stores import add_file, check_file, id_of, make_store, noise
from tests.upkeep.test_budget import bytes_in
from tests.wording import refused

DIM = 256
MARGIN = 16_384  # notes of use until the next prune, and tree pages that removing rewrites


def measured(path: Path) -> Path:
    with Store.open(path) as store, store.writer() as pen:
        state = store.codec_state()
        losses = {level: {"kl_answer": 0.001 * int(level)} for level in NESTED}
        pen.set_codec_state(state | {"losses": {state["profile"]: losses}})
    return path


def noted(path: Path, *labels: str, when: int) -> None:
    append(path / "access.log", (f"{id_of(label).hex()} {when}" for label in labels))


def pruned(path: Path, max_size: int | None = None, **options: Any) -> PruneReport:
    return prune(path, PruneOptions(max_size=max_size, yes=True, **options))


def with_kv(path: Path) -> list[str]:
    with Store.open(path) as store:
        return [s for s in store.sources() if all(store.has_chunk(id_of(f"{s}.{n}")) for n in range(2))]


def test_a_low_watermark_that_cannot_be_reached_costs_nothing(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", 40, 3, DIM)
    pin(path, [f"f{number}" for number in range(34)])
    limit = int(prune(path, PruneOptions(max_size=1, dry_run=True)).after / 0.95)
    keep_budget(path, limit)
    before = with_kv(path)
    planned = prune(path, PruneOptions(dry_run=True))
    done = prune(path, PruneOptions())
    assert (planned.goal, done.goal, done.within_budget) == (limit, limit, True)
    assert [step.to_json() for step in planned.steps] == [step.to_json() for step in done.steps]
    assert 34 < len(with_kv(path)) < len(before) == 40
    assert done.after <= limit
    here = with_kv(path)
    assert prune(path, PruneOptions(yes=True)).steps == []
    assert with_kv(path) == here


def test_down_to_the_budgets_low_watermark_by_use(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=20, dim=DIM)
    now = int(time.time())
    noted(path, *(f"f{number}.{chunk}" for number in (3, 7, 11) for chunk in range(2)), when=now + 100)
    budget = bytes_in(path) // 2
    keep_budget(path, budget)
    with Store.open(path) as store, store.writer() as pen, refused(NoSpaceError):
        add_file(pen, "more", ["more.0"], DIM)
    said = kvtool("store", "prune", "--store", path, "--dry-run", "--json").fine().json
    assert bytes_in(path) > budget
    done = kvtool("store", "prune", "--store", path, "--yes", "--json").fine().json
    assert done["steps"] == said["steps"]
    assert bytes_in(path) <= 0.9 * budget + 8192
    assert done["bytes_after"] == pytest.approx(bytes_in(path), abs=500)
    assert said["bytes_after"] == pytest.approx(done["bytes_after"], rel=0.05)
    assert {"f3", "f7", "f11"} < set(with_kv(path)) != {"f3", "f7", "f11"}
    with Store.open(path) as store:
        assert verify(store) == []
        assert len(store.sources()) == 20  # the text stays
        with store.writer() as pen:
            add_file(pen, "f50", ["f50.0"], DIM)  # there is room again


def test_nothing_says_how_far(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=4, dim=DIM)
    kvtool("store", "prune", "--store", path).failed(2, "no target size given")
    kvtool("store", "prune", "--store", path, "--unused", "soon").failed(2, "'soon' is not a length of time")
    with refused(UsageError):
        prune(path, PruneOptions(max_size=300_000))
    assert len(with_kv(path)) == 4
    table = kvtool("store", "prune", "--store", path, "--max-size", "300kB", "--dry-run").fine()
    assert "kv" in table.out
    assert "would be" in table.out


def test_what_is_pinned_stands_in_the_way(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=6, dim=DIM)
    kvtool("store", "pin", "f1", "--store", path).fine()
    for words in ((), ("--remove",)):
        kvtool("store", "pin", *words, id_of("f1.0").hex()[:10], "--store", path).failed(2, "a chunk cannot be pinned")
    done = kvtool("store", "prune", "--store", path, "--max-size", "200kB", "--dry-run", "--json")
    assert done.code == 14
    assert not done.json["within_budget"]
    assert done.json["bytes_after"] > 3 * 65_000
    assert done.json["refusal"].startswith("the store cannot get down to")
    assert "store pin --remove" in done.err
    assert "--no-compact" not in done.err  # which would change nothing
    assert len(with_kv(path)) == 6
    emptied(path)
    with Store.open(path) as store:
        check_file(store, "f1", dim=DIM)
        assert store.levels(id_of("f0.0")) == []
    assert kvtool("store", "pin", "--store", path, "--json").fine().json["sources"] == ["f1"]
    rows = kvtool("store", "ls", "--store", path, "--json").json["documents"]
    assert [row["source"] for row in rows if row["pinned"]] == ["f1"]
    unpin(path, ["f1"])
    with refused(UsageError):
        unpin(path, ["f1"])
    emptied(path)
    assert with_kv(path) == []


def test_a_size_that_cannot_be_reached_lets_nothing_go(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=6, dim=DIM)
    before = bytes_in(path)
    failed = kvtool("store", "prune", "--store", path, "--max-size", "10kB", "--yes", "--quiet")
    failed.failed(14, "the store cannot get down to 10.0 kB, so nothing was removed")
    assert len(with_kv(path)) == 6
    assert bytes_in(path) == pytest.approx(before, abs=500)
    emptied(path)
    assert with_kv(path) == []
    with refused(NoSpaceError):
        pruned(path, 10_000)


def test_text_goes_with_its_documents_only(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", dim=DIM)
    with Store.open(path) as store, store.writer() as pen:
        entry = FileEntry("long", 1, 2, "digest", "settings", ("long",))
        pen.commit_file(entry, [DocumentEntry("long", "text", noise("long", 400_000).hex(), ())])
    for size in ("300kB", "10kB"):
        kvtool("store", "prune", "--store", path, "--max-size", size, "--yes").failed(14, "cannot get down")
    with Store.open(path) as store:
        assert len(store.sources()) == 3
    later = time.time() + 100 * 86400
    assert prune(path, PruneOptions(max_size=300_000, unused=86400, yes=True), now=later).within_budget


@pytest.mark.parametrize("pinned", [(), ("f3",), ("f1", "f4", "f8", "f9", "f14")])
def test_the_expected_size_is_one_that_is_reached(pinned: tuple[str, ...], tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=16, chunks=20, dim=64)
    if pinned:
        pin(path, pinned)
    said = prune(path, PruneOptions(max_size=1, dry_run=True))
    done = pruned(path, said.after + MARGIN)
    assert done.within_budget
    assert done.after <= said.after + 4096
    with Store.open(path) as store:
        assert verify(store) == []


def test_the_command_keeps_a_budget_and_prunes_to_it(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=20, dim=DIM)
    before = bytes_in(path)
    words = ("store", "prune", "--store", path, "--json", "--budget")
    assert kvtool(*words, str(2 * before)).fine().json["steps"] == []
    rehearsed = kvtool(*words, str(before // 2), "--dry-run").fine().json
    with Store.open(path) as store:
        assert store.budget() == 2 * before
    done = kvtool(*words, str(before // 2), "--yes").fine().json
    assert done["steps"] == rehearsed["steps"] != []
    assert bytes_in(path) <= before // 2
    kvtool(*words, "none", "--unused", "1d").failed(2, "prunes nothing")
    for form in ((), ("--json",)):
        done = kvtool("store", "prune", "--store", path, "--budget", "none", "--dry-run", *form).fine()
        assert form or "would have no size budget" in done.out
    with Store.open(path) as store:
        assert store.budget() == before // 2
    assert kvtool(*words, "none").fine().json["budget"] is None
    with Store.open(path) as store:
        assert store.budget() is None
    kvtool(*words, "20XB").failed(2, "is not a size")
    kvtool(*words, "1GB", "--max-size", "1GB").failed(2, "exclude each other")


def test_what_is_asked_for_whatever_the_size_is_done_all_the_same(fitted: Path) -> None:
    path = measured(fitted)
    keep_budget(path, "10kB")
    done = kvtool("store", "prune", "--cold", "0s", "--quiet", "--store", path)
    assert done.code == 14
    assert "so nothing was removed for the size" in done.err
    assert {tuple(levels_in(path)[chunk]) for chunk in chunks_in(path)} == {("4",)}
    row = kvtool("store", "prune", "--cold", "0s", "--dry-run", "--json", "--store", path).json
    assert (row["steps"], row["refusal"], row["within_budget"]) == ([], None, False)
    kvtool("store", "prune", "--yes", "--store", path).failed(14, "cannot get down to 10.0 kB")


def test_pinned_chunks_of_an_older_store_are_ignored(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=2)
    with Store.open(path) as store, store.writer() as pen:
        pen.commit([meta_row(tables.PINS_KEY, {"sources": ["f1"], "chunks": [id_of("f0.0").hex()]})])
        pen.remove_file("f0")
    assert compact(path).chunks == 2
    with Store.open(path) as store:
        assert (store.pins(), store.stats()["pins"]) == (["f1"], {"sources": 1})


def test_documents_that_were_not_used_are_forgotten(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=4, dim=DIM)
    later = time.time() + 100 * 86400
    noted(path, "f2.1", when=int(later) - 86400)
    done = prune(path, PruneOptions(unused=30 * 86400, yes=True), now=later)
    assert [step.name for step in done.steps] == ["documents"]
    with Store.open(path) as store:
        assert store.sources() == ["f2"]
        check_file(store, "f2", dim=DIM)
        assert verify(store) == []


def test_without_compacting_pages_are_free_and_the_file_stays(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=6, dim=DIM)
    before = bytes_in(path)
    assert not pruned(path, before // 2, compact=False).within_budget
    with Store.open(path) as store:
        assert store.stats()["free_bytes"] > before * 0.4
    assert pruned(path, before // 2).steps == []  # only given back
    assert bytes_in(path) <= before // 2


@pytest.mark.parametrize("page", range(8))
def test_a_goal_a_few_pages_off_is_reached_too(tmp_path: Path, page: int) -> None:
    path = make_store(tmp_path / "store", files=6, dim=DIM)
    pruned(path, bytes_in(path) - 8 * DIM)
    compact(path)
    with Store.open(path) as store:
        assert store.stats()["free_bytes"] == 0
    goal = bytes_in(path) - page * 4096
    assert pruned(path, goal).within_budget
    assert bytes_in(path) <= goal


def test_levels_go_from_exact_to_coarse_and_questions_go_on(fitted: Path) -> None:
    path = measured(fitted)
    prefix = prefix_chunk(path)
    chunks = chunks_in(path)
    rows = kvtool("store", "stats", "--store", path, "--json").json["levels"]
    raw = sum(row["bytes"] for row in rows if row["level"] == "raw")
    pruned(path, bytes_in(path) - raw // 2)
    some = levels_in(path)
    assert {len(some[chunk]) for chunk in chunks} <= {4, 5}
    assert 0 < sum("raw" in some[chunk] for chunk in chunks) < len(chunks)
    assert emptied(path).json["steps"][-1]["step"] == "profile"
    with Store.open(path) as store:
        assert store.codec_state()["profile"] == ""
        assert store.profile_digests() == []
    assert {chunk: levels for chunk, levels in levels_in(path).items() if levels} == {prefix: ["raw"]}
    assert damages(path) == []
    answered = kvtool("query", QUESTION, "--store", path, *SHORT, "--json").fine().json
    assert {chunk["status"] for chunk in answered["chunks"]} == {"miss"}
    kvtool("query", QUESTION, "--store", path, *SHORT, "--compare", "union").fine()  # which stores them
    again = kvtool("query", QUESTION, "--store", path, *SHORT, "--json").fine().json
    assert {chunk["status"] for chunk in again["chunks"]} <= {"hit", "exact"}


def test_chunks_that_lose_their_levels_one_by_one_are_asked_for_too(fitted: Path) -> None:
    """A chunk's smallest level is removed last: nearly all questions would miss, for few bytes."""
    measured(fitted)
    before = levels_in(fitted)
    expected = prune(fitted, PruneOptions(max_size=1, dry_run=True)).after
    with refused(UsageError):
        prune(fitted, PruneOptions(max_size=expected + MARGIN))
    assert levels_in(fitted) == before


def test_an_exact_record_stays_where_its_coarse_ones_are_damaged(fitted: Path) -> None:
    path = measured(fitted)
    first = chunks_in(path)[0]
    replace_record(path, first, "4", 1, lambda data: data.__setitem__(70, data[70] ^ 1))
    replace_record(path, first, "1", 1, lambda data: data.__setitem__(70, data[70] ^ 1))
    assert prune(path, PruneOptions(cold=0.0, yes=True), now=time.time() + 10).exact_retained == 1
    levels = levels_in(path)
    assert levels.pop(first) == ["raw"]
    assert {tuple(levels[chunk]) for chunk in chunks_in(path)[1:]} == {("4",)}
    assert damages(path) == []


def test_old_profiles_go_once_no_record_names_them(fitted: Path) -> None:
    with Store.open(fitted) as store:
        first = store.profile_digests()
    refit(fitted, "2", chunks=tuple(chunks_in(fitted)[:1]))
    assert compact(fitted).profiles == 0  # the other chunks' records name the old one
    with Store.open(fitted) as store:
        assert len(store.profile_digests()) == 2
        with store.writer() as pen:
            for level in NESTED:
                pen.drop_level([bytes.fromhex(chunk) for chunk in chunks_in(fitted)[1:]], level)
    assert kvtool("store", "compact", "--store", fitted, "--json").fine().json["profiles"] == 1
    with Store.open(fitted) as store:
        assert set(store.profile_digests()).isdisjoint(first)


def test_a_prune_without_space_for_a_copy_drops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise NoSpaceError("the store's file cannot shrink")

    path = make_store(tmp_path / "store", files=4, dim=DIM)
    expected = prune(path, PruneOptions(max_size=1, dry_run=True)).after
    monkeypatch.setattr(layout, "check_copy", full)
    with refused(NoSpaceError):
        pruned(path, expected + MARGIN)
    assert with_kv(path) == []


def test_old_leftovers_are_reclaimed_by_the_next_writer(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    old, young = path / ".tmp-77-01234567", path / ".tmp-77-89abcdef"
    for leftover in (old, young):
        leftover.write_bytes(b"cut off")
    os.utime(old, (1, 1))
    with Store.open(path) as store, store.writer():
        assert not old.exists()
        assert young.exists()  # somebody may be writing it
        check_file(store, "f0")


def test_the_same_from_python(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=6, dim=DIM)
    with package.open(path) as cache:
        assert cache.remove("f0").sources == ("f0",)
        assert cache.compact().after == pytest.approx(bytes_in(path), abs=500)
        cache.set_budget(bytes_in(path) // 2)
        report = cache.prune(yes=True)
        assert report.within_budget
        assert report.goal is not None
        assert report.after <= report.goal
        for size, budget in ((None, None), ("20GB", 20 * 10**9), ("none", None)):
            cache.set_budget(size)
            assert cache.stats()["budget"] == budget


def test_verify_repairs_what_is_damaged_in_any_table(fitted: Path) -> None:
    with Store.open(fitted) as store, store.writer() as pen:
        store.note_access([bytes.fromhex(chunk) for chunk in chunks_in(fitted)])
        pen.fold_access()
        info = StretchInfo(0, 7, (), (0,), (), True, 5, Arithmetic("float32", "cpu"))
        pen.put_stretch(b"s" * 20, info, [(("state", 0), b"12345")])
        pen.describe({b"f" * 20: ChunkInfo((1,), b"", 0)}, Origin("elsewhere", trusted=False))
        with store.snapshot() as snapshot:
            rows = [(table, next(iter(snapshot.keys(table)))) for table in tables.TABLES if table != tables.META]
            values = [bytearray(snapshot.get(table, key) or b"") for table, key in rows]
        for (table, key), value in zip(rows, values, strict=True):
            value[-1] ^= 1
            store.environment.write(lambda write, at=table + key, new=bytes(value): write.put(at, new), 0)
    done = kvtool("store", "verify", "--repair", "--store", fitted, "--json").fine().json
    assert done["repaired"] >= len(rows)
    assert len(done["damaged"]) >= len(rows)
    assert damages(fitted) == []


def test_repair_drops_what_it_can_of_a_store_with_damaged_pages(fitted: Path) -> None:
    with Store.open(fitted) as store:
        data = store.environment.generation / "data.mdb"
    pages = bytearray(data.read_bytes())
    big = [at for at in range(0, len(pages), 4096) if pages[at + 10 : at + 12] == b"\4\0"]  # first pages of long values
    pages[big[0] : big[0] + 8] = bytes(8)
    pages[big[1] + 100] ^= 1
    data.write_bytes(pages)
    done = kvtool("store", "verify", "--repair", "--store", fitted)
    assert (done.code, "dropped" in done.out, "store export" in done.err) == (13, True, True), done.out
    left = damages(fitted)
    assert left
    assert all("the pages of a value" in reason for reason in left)


def test_lines_of_a_crontab_are_silent_on_success(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=3, dim=DIM)
    kvtool("store", "prune", "--budget", str(2 * bytes_in(path)), "--store", path).fine()
    for words in (("prune", "--cold", "30d"), ("prune",), ("compact",), ("verify", "--sample", "1/7", "--repair")):
        done = kvtool("store", *words, "--store", path, "--quiet").fine()
        assert (done.out, done.err) == ("", "")
    assert len(with_kv(path)) == 3
