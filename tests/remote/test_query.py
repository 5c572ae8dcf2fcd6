"""Questions to a shared store: the answers of the local one, whatever happens to the shared one."""

from __future__ import annotations

import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.query import streaming
from kvtool.core.remote.mirror import local_place, open_shared
from kvtool.core.remote.prefetch import Prefetcher
from kvtool.core.session.identity import MeasuredLosses
from tests.cli.working import PREFIX, QUESTION, SHORT, Done, chunks_of, kvtool, payloads, prefix_chunk, write_corpus
from tests.compress.making import LOSSES, fixed_losses, run
from tests.families import save_tiny
from tests.remote.backends import FAR
from tests.remote.serving import Link, RedisServer, free_port, wreck
from tests.spying import calls_of

MODES = ("reuse", "union", "prefix", "full")
MODES_THERE = ("union", "reuse", "blend", "union", "reuse")  # in addition to `FAR`
OVERHEAD = 80  # bytes of a record around its payload
SLO = ("--slo-ms", "600000")


def ask(place: object, *more: object, mode: str = "union") -> Done:
    return kvtool("query", QUESTION, "--store", place, "--fusion", mode, "--json", *SHORT, *more)


def said(done: Done) -> tuple[Any, ...]:
    """Return what must not depend on where records come from."""
    value = done.fine().json
    return value["answer"], [(one["id"], one["status"]) for one in value["chunks"]], value["tokens"]


def with_the_same_holes(path: Path, done: Done) -> Path:
    """Copy a store without the records that an answer had to do without."""
    copy = shutil.copytree(path, path.with_name("holes"), dirs_exist_ok=True)
    value = done.fine().json
    holes = [bytes.fromhex(one["id"]) for one in value["chunks"] if one["status"] == "miss"]
    cached = sum(one["tokens"] for one in value["chunks"] if one["status"] != "miss")
    if value["tokens"]["reused"] + value["tokens"]["recomputed"] == cached:  # the prompt's beginning is one, too
        holes.append(bytes.fromhex(prefix_chunk(path)))
    with Store.open(copy) as opened, opened.writer() as writer:
        writer.drop_level(holes, "raw")
    return copy


@pytest.fixture
def shared(store: Path, url: str) -> str:
    kvtool("store", "push", url, "--store", store).fine()
    return url


@pytest.fixture
def far(store: Path, behind: Link) -> Link:
    kvtool("store", "push", behind.home, "--store", store).fine()
    return behind


@pytest.mark.some(3)
@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize(("mode", "slo"), [(mode, slo) for mode in MODES for slo in ((), SLO)])
def test_the_answer_of_the_local_store(mode: str, slo: tuple[str, ...], store: Path, shared: str) -> None:
    wanted = said(ask(store, mode=mode))
    first = ask(shared, *slo, mode=mode)
    assert said(first) == wanted
    again = ask(shared, *slo, mode=mode)
    assert said(again) == wanted
    here = payloads(local_place(shared)) if SELECTORS[mode].uses_cache else {}
    assert bool(here) is SELECTORS[mode].uses_cache
    assert here.items() <= payloads(store).items()  # byte for byte
    if slo:
        assert {row["decision"] for row in first.json["stream"]} == ({"base"} if here else set())
        assert again.json["stream"] == []  # what came once is not fetched again
        assert first.json["slo"]["met"]
        assert sum(row["bytes"] for row in first.json["stream"]) == sum(OVERHEAD + len(one) for one in here.values())
        assert first.json["bytes_read"] == ask(store, mode=mode).json["bytes_read"]


@pytest.mark.some(1)
def test_query_without_the_corpus(tiny: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus")
    place = tmp_path / "store"
    kvtool("ingest", tmp_path / "corpus", "--store", place, "--model", tiny, "--chunk-tokens", "64", *PREFIX).fine()
    kvtool("store", "push", url, "--store", place).fine()
    wanted, records = said(ask(place)), payloads(place)
    shutil.rmtree(tmp_path / "corpus")
    shutil.rmtree(place)
    monkeypatch.setenv("KVTOOL_HOME", str(tmp_path / "another home"))
    assert said(ask(url)) == wanted
    kvtool("store", "pull", url, "--store", tmp_path / "pulled").fine()
    assert payloads(tmp_path / "pulled") == records
    assert said(ask(tmp_path / "pulled")) == wanted


def test_query_finds_later_pushes(store: Path, shared: str, tmp_path: Path) -> None:
    ask(shared).fine()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "seventh.md").write_text(
        "# The seventh mill\n\nThe seventh mill was built in 1999 by baker Q."
    )
    kvtool("ingest", tmp_path / "more", "--store", store).fine()
    kvtool("store", "push", shared, "--store", store).fine()
    done = kvtool("query", "Who built the seventh mill in 1999?", "--store", shared, "--json", *SHORT).fine()
    assert any(one["source"].endswith("seventh.md") for one in done.json["chunks"])


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.usefixtures("slow_machine")
def test_compressed_levels(store: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kvtool("compress", "--level", "1", "--level", "2", "--store", store, "--questions", "0").fine()
    kvtool("store", "push", url, "--store", store).fine()
    asked = calls_of(monkeypatch, Prefetcher, "ask", lambda self, wanted: [one.name for one in wanted])
    for level in ("2", "1", "raw"):
        asked.clear()
        assert said(ask(url, "--level", level)) == said(ask(store, "--level", level))
        levels = {name.split("/")[2].partition("-")[0] for names in asked for name in names if name.startswith("kv/")}
        assert levels == ({level, "raw"} if level == "2" else {level})  # the prompt's beginning is raw; 1 refines 2
        done = ask(url, "--level", level, *SLO)
        assert said(done) == said(ask(store, "--level", level))
    with Store.open(local_place(url)) as here:
        assert {level for chunk in here.chunk_ids() for level in here.levels(chunk)} == {"1", "2", "raw"}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.usefixtures("slow_machine")
def test_lossy_levels_of_unknown_loss_are_streamed_as_they_would_be_read(store: Path, url: str) -> None:
    kvtool("compress", "--level", "2", "--drop-raw", "--yes", "--store", store, "--questions", "0").fine()
    kvtool("store", "push", url, "--store", store).fine()
    done = ask(url, *SLO)
    assert said(done) == said(ask(store))
    assert {row["level"] for row in done.json["stream"]} == {"raw", "2"}  # the prompt's beginning is never lossy


def test_other_commands(shared: str, store: Path, tmp_path: Path) -> None:
    ask(shared).fine()
    for what in ((), ("plan", QUESTION), ("gate",)):
        done = kvtool("inspect", *what, "--store", shared, "--json").fine()
        assert done.json
    for command in (("ingest", tmp_path), ("compress",), ("store", "stats"), ("store", "push", shared)):
        kvtool(*command, "--store", shared).failed(2)


# ---- trouble -----------------------------------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize("slo", [(), SLO], ids=["as asked", "streamed"])
@pytest.mark.parametrize(("mode", "behind"), [*zip(MODES_THERE, FAR, strict=True)], indirect=["behind"])
def test_query_of_a_store_that_dies(mode: str, slo: tuple[str, ...], store: Path, far: Link) -> None:
    ask(far.url, mode="full").fine()  # the catalogue is here
    far.after(ask(store).json["bytes_read"] * 2 // 3, far.close)
    done = ask(far.url, *slo, mode=mode)
    assert "what is not here is computed" in done.err
    assert "sent nothing" not in done.err  # nobody waits once more for what has broken off
    statuses = {one["status"] for one in done.fine().json["chunks"]}
    assert statuses == ({"hit", "miss"} if slo else {"miss"})  # chunk by chunk, or layer by layer
    assert said(done) == said(ask(with_the_same_holes(store, done), mode=mode))
    if not slo:  # holes are stored; what an objective left no time to fetch may be fetched another time
        assert all(one["status"] != "miss" for one in ask(far.url, mode=mode).fine().json["chunks"])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("slo", "behind"), [*zip(cycle([(), ("--slo-ms", "2000")]), FAR, strict=False)], indirect=["behind"]
)
def test_query_of_a_slow_store(slo: tuple[str, ...], store: Path, far: Link) -> None:
    ask(far.url, mode="full").fine()
    far.after(ask(store).json["bytes_read"] // 2, far.crawl)
    done = ask(far.url, "--remote-timeout", "0.5", *slo)
    assert said(done) == said(ask(with_the_same_holes(store, done)))
    assert "miss" in {one["status"] for one in done.json["chunks"]} or computed_meanwhile(done)
    if slo:
        assert any(row["decision"].startswith(("gave up", "text")) for row in done.json["stream"])
    else:
        assert "within 0.5 s" in done.err


@pytest.mark.some(2)
@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize("slo", [(), SLO], ids=["as asked", "streamed"])
def test_query_of_damaged_values(slo: tuple[str, ...], store: Path, url: str) -> None:
    kvtool("store", "push", url, "--store", store).fine()
    used = ask(store).json["chunks"]
    for number, chunk in enumerate(used[:2]):
        wreck(url, chunk["id"], "raw", number + 1)
    done = ask(url, *slo)
    bad = {one["id"] for one in done.fine().json["chunks"] if one["status"] == "miss"} | computed_meanwhile(done)
    assert bad == {chunk["id"] for chunk in used[:2]}
    assert said(done) == said(ask(with_the_same_holes(store, done)))
    kvtool("store", "push", url, "--store", store, "--verify").fine()
    shutil.rmtree(local_place(url))
    assert said(ask(url, *slo)) == said(ask(store))


def computed_meanwhile(done: Done) -> set[str]:
    return {row["chunk"] for row in done.json.get("stream", ()) if row["decision"] == "text, computed meanwhile"}


@pytest.mark.some(1)
@pytest.mark.usefixtures("slow_machine")
@pytest.mark.parametrize(("mode", "behind"), [*zip(cycle(["union", "reuse"]), FAR, strict=False)], indirect=["behind"])
def test_missing_chunks_are_computed(mode: str, store: Path, far: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_alone", lambda session, plan, speeds, number: 0.05)
    used = [one["id"] for one in ask(store, mode=mode).json["chunks"]]  # the most relevant is last, and asked for first
    with Store.open(store) as opened, opened.writer() as writer:
        writer.drop_level([bytes.fromhex(used[1])], "raw")
    kvtool("store", "push", far.home, "--store", store, "--delete").fine()
    wreck(far.home, used[-1], "raw", 1)
    kvtool("query", QUESTION, "--store", store, "--compare", mode, *SHORT).fine()  # which makes it again, here
    ask(far.url, mode="full").fine()
    far.rate = 2e5  # about a second for all the others
    done = ask(far.url, *SLO, mode=mode)
    far.rate = 1e12
    holes = {one["id"] for one in done.json["chunks"] if one["status"] == "miss"}
    assert computed_meanwhile(done) | holes >= {used[1], used[-1]}
    assert not computed_meanwhile(done) & holes  # computed whole, or in the pass after it
    assert said(done) == said(ask(with_the_same_holes(store, done) if holes else store, mode=mode))
    with Store.open(local_place(far.url)) as opened:
        assert opened.levels(bytes.fromhex(used[1])) == ["raw"]  # what nobody had is kept
    again = ask(far.url, *SLO, mode=mode)  # nothing else is to be fetched: what is damaged is computed in its place
    assert said(again) == said(ask(with_the_same_holes(store, again), mode=mode))


def test_another_models_records(tiny: Path, tmp_path: Path, redis_url: str, store: Path) -> None:
    kvtool("store", "push", redis_url, "--store", store).fine()
    wanted = said(ask(redis_url))
    import redis

    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    other = save_tiny("qwen2", tmp_path / "other")
    write_corpus(tmp_path / "corpus", documents=2)
    kvtool("ingest", tmp_path / "corpus", "--store", tmp_path / "foreign", "--model", other, *PREFIX).fine()
    kvtool("store", "push", redis_url, "--store", tmp_path / "foreign").fine()
    done = ask(redis_url)
    assert said(done) == wanted
    assert "made with another" in done.err


def test_query_push_and_pull_of_an_unreachable_store(
    store: Path, redis_server: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    ask(nobody).failed(1)
    kvtool("store", "push", nobody, "--store", store).failed(1)
    kvtool("store", "pull", nobody, "--store", tmp_path / "new").failed(1)
    assert not (tmp_path / "new").exists()
    ask("redis://no.such.host.invalid/0").failed(1)
    ask(redis_url).failed(10)
    ask("ftp://host/x").failed(2)
    link = Link(redis_server.port)
    kvtool("store", "push", link.url, "--store", store).fine()
    wanted = said(ask(link.url))
    link.close()
    for slo in ((), SLO):  # what is here is used, with an objective, too
        done = ask(link.url, *slo)
        assert said(done) == wanted
        assert "only what is here already is used" in done.err


def test_json_of_the_commands(store: Path, url: str, tmp_path: Path) -> None:
    pushed = kvtool("store", "push", url, "--store", store, "--json").fine().json
    assert pushed["files"] == {"transferred": 6, "unchanged": 0}
    assert pushed["chunks"]["transferred"] == len({row[0] for row in payloads(store)})
    pulled = kvtool("store", "pull", url, "--store", tmp_path / "other", "--json").fine().json
    assert (pulled["files"], pulled["chunks"]) == (pushed["files"], pushed["chunks"])
    for way in ("pull", "push"):
        again = kvtool("store", way, url, "--store", tmp_path / "other", "--json").fine().json
        assert again["files"] == {"transferred": 0, "unchanged": 6}
    assert kvtool("store", "push", url, "--store", tmp_path / "nothing").code == 10
    assert kvtool("store", "pull", url, "--level", "9", "--store", store).code == 2


def test_profile_of_a_shared_stores_records(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_losses(monkeypatch)
    run(store, "2", questions=1)
    url, chunk = f"file://{tmp_path}/tier", bytes.fromhex(chunks_of(store, "mill0.md")[0])
    kvtool("store", "push", url, "--store", store).fine()
    with open_shared(url) as tier:
        assert MeasuredLosses(tier).of(chunk, ["raw", "2"]) == {"2": LOSSES["2"]}
        assert tier.link is not None
        assert not tier.link.is_here(chunk, "2")
