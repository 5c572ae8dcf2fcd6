"""Windowed models over a shared store: rows that the pass sees are sent first; the rest once, after the answer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtool
from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.errors import RemoteError
from kvtool.core.query.reply import Reply
from kvtool.core.remote.mirror import local_place, open_shared
from kvtool.core.remote.prefetch import Prefetcher
from kvtool.core.remote.tier import Tier
from kvtool.core.upkeep.budget import keep_budget
from tests.cli.working import CHUNKS, LAYERS, PREFIX, QUESTION, damages, payloads, write_corpus
from tests.cli.working import kvtool as command
from tests.families import save_tiny
from tests.remote.serving import wreck

FULL = 2  # the layer of the tiny model that sees everything
Record = tuple[str, str, int]  # chunk, level, layer


@dataclass
class Asked:
    """Records that a tier was asked for: for an answer, and when it was there."""

    first: list[Record] = field(default_factory=list)
    rest: list[Record] = field(default_factory=list)
    over: bool = False

    def take(self, names: list[str]) -> None:
        for _, chunk, level, layer in (name.split("/") for name in names if name.startswith("kv/")):
            (self.rest if self.over else self.first).append((chunk, level.partition("-")[0], int(layer)))


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store of a tiny gpt-oss, three of whose four layers see 16 tokens; leave it as it is."""
    folder = tmp_path_factory.mktemp("windowed")
    torch.set_num_threads(1)
    save_tiny("gpt-oss", folder / "model")
    write_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        place = folder / "store"
        command("ingest", folder / "corpus", "--store", place, "--model", folder / "model", *CHUNKS, *PREFIX).fine()
    return place


@pytest.fixture
def store(ingested: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ingested, tmp_path / "store"))


@pytest.fixture
def shared(store: Path, url: str) -> str:
    command("store", "push", url, "--store", store).fine()
    return url


@pytest.fixture
def in_folder(store: Path, tmp_path: Path) -> str:
    """Make a shared store of one kind, for tests that concern all kinds alike."""
    url = f"file://{tmp_path / 'shared'}"
    command("store", "push", url, "--store", store).fine()
    return url


def asking(place: Path | str, told: list[str] | None = None, **options: Any) -> tuple[Reply, Asked]:
    """Return an answer, and what a shared store was asked for."""
    asked = Asked()
    real, rest = Prefetcher.ask, Tier._fetch_rest

    def ask(self: Prefetcher, wanted: Any) -> None:
        asked.take([one.name for one in wanted])
        real(self, wanted)

    def fetch_rest(self: Tier) -> None:
        asked.over = True
        rest(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefetcher, "ask", ask)
        patch.setattr(Tier, "_fetch_rest", fetch_rest)
        with kvtool.open(place, warn=lambda text, hint: None if told is None else told.append(text)) as cache:
            return cache.query(QUESTION, max_tokens=4, top_k=8, **options), asked


def read_here(place: Path, **options: Any) -> tuple[Reply, list[Record]]:
    """Return an answer of a store that is a folder, and the records that its pass reads."""
    found: list[Record] = []
    real = Store.read_layer

    def read(self: Store, chunk_ids: Any, level: str, layer: int, *more: Any) -> Any:
        found.extend((chunk_id.hex(), level, layer) for chunk_id in chunk_ids)
        return real(self, chunk_ids, level, layer, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "read_layer", read)
        reply, _ = asking(place, **options)
    return reply, found


def same(reply: Reply, wanted: Reply) -> None:
    assert torch.equal(reply.fused.logits, wanted.fused.logits)
    assert reply.generated.ids == wanted.generated.ids
    assert reply.fused.read_set.to_json() == wanted.fused.read_set.to_json()
    assert (reply.bytes_read, reply.bytes_spared) == (wanted.bytes_read, wanted.bytes_spared)


def whole(records: list[Record]) -> set[Record]:
    return {(chunk, level, layer) for chunk, level, _ in records for layer in range(LAYERS)}


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", ["reuse", "epic"])
def test_what_is_asked_for_is_what_the_pass_reads(mode: str, store: Path, shared: str) -> None:
    wanted, reads = read_here(store, fusion=mode)
    assert wanted.fused.read_set.to_json()["records_spared"] > 0
    reply, asked = asking(shared, fusion=mode)
    same(reply, wanted)
    assert sorted(asked.first) == sorted(reads)
    assert {*asked.rest} == whole(reads) - {*reads}  # once it is answered, so that all of it is kept
    assert len(asked.rest) == len({*asked.rest})
    assert payloads(local_place(shared)).items() <= payloads(store).items()
    assert damages(local_place(shared)) == []
    again, nothing = asking(shared, fusion=mode)
    same(again, wanted)
    assert (nothing.first, nothing.rest) == ([], [])
    other, nothing = asking(shared, fusion="blend")  # which reads all of them
    same(other, asking(store, fusion="blend")[0])
    assert (nothing.first, nothing.rest) == ([], [])


@pytest.mark.parametrize("mode", ["blend", "infoflow"])
def test_a_mode_that_chooses_on_the_way_asks_for_all_that_it_may_choose(mode: str, store: Path, in_folder: str) -> None:
    wanted, reads = read_here(store, fusion=mode)
    reply, asked = asking(in_folder, fusion=mode)
    same(reply, wanted)
    assert sorted(asked.first) == sorted(reads)
    hits = {one.source.chunk_id.hex() for one in wanted.fused.plan.chunks if one.status == "hit"}
    assert {*asked.first} >= {(chunk, "raw", layer) for chunk in hits for layer in range(LAYERS)}
    assert hits.isdisjoint(chunk for chunk, _, _ in asked.rest)


def test_records_that_refine_others(store: Path, tmp_path: Path) -> None:
    """Check that the same layers of both levels are read."""
    command("compress", "--fit", "--level", "1", "--level", "2", "--store", store, "--questions", "0").fine()
    url = f"file://{tmp_path / 'shared'}"
    command("store", "push", url, "--store", store).fine()
    wanted, reads = read_here(store, fusion="reuse", level="1")
    assert {level for _, level, _ in reads} == {"1", "2", "raw"}  # the prompt's beginning is raw
    reply, asked = asking(url, fusion="reuse", level="1")
    same(reply, wanted)
    assert {*asked.first} == {*reads}
    assert {*asked.rest} == whole(reads) - {*reads}
    again, nothing = asking(url, fusion="reuse", level="1")
    same(again, wanted)
    assert (nothing.first, nothing.rest) == ([], [])


def interrupted(patch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let so many records come of those that no row saw, then cause this, once."""
    real, rest = Prefetcher.take, Tier._fetch_rest
    errors, left = [error], list[int]()

    def take(self: Prefetcher, timeout: float) -> Any:
        if left and errors:
            left[0] -= 1
            if left[0] < 0:
                raise errors.pop()
        return real(self, timeout)

    def fetch_rest(self: Tier) -> None:
        left[:] = [after]
        rest(self)

    patch.setattr(Prefetcher, "take", take)
    patch.setattr(Tier, "_fetch_rest", fetch_rest)


def test_a_tier_that_goes_before_what_others_refine_has_come(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a finer record is kept only with the coarser one, without which it is of no use."""
    command("compress", "--fit", "--level", "1", "--level", "2", "--store", store, "--questions", "0").fine()
    url = f"file://{tmp_path / 'shared'}"
    command("store", "push", url, "--store", store).fine()
    _, asked = asking(url, fusion="reuse", level="1")
    here = local_place(url)
    shutil.rmtree(here)
    of_last = [level for _, level, layer in asked.rest if layer == LAYERS - 1]
    interrupted(monkeypatch, len(asked.rest) - of_last.count("2") + 1, RemoteError("it is gone"))
    told: list[str] = []
    asking(url, told, fusion="reuse", level="1")
    assert [text for text in told if "it is gone" in text] != []
    with Store.open(here) as opened:
        kept = [{*opened.sizes_here(chunk_id)} for chunk_id in opened.chunk_ids()]
    assert {"1", "2"} in kept
    assert [levels for levels in kept if "1" in levels and "2" not in levels] == []


def test_ctrl_c_while_the_rest_comes(store: Path, in_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again for what was on its way: nothing that comes then is taken for something else, and damaged."""
    told: list[str] = []
    interrupted(monkeypatch, 3, KeyboardInterrupt())
    with kvtool.open(in_folder, warn=lambda text, hint: told.append(text)) as cache:
        with pytest.raises(KeyboardInterrupt):
            cache.query(QUESTION, max_tokens=4, top_k=8, fusion="reuse")
        again = cache.query(QUESTION, max_tokens=4, top_k=8, fusion="reuse")
    assert told == []
    same(again, asking(store, fusion="reuse")[0])
    here = payloads(local_place(in_folder))
    assert {chunk for chunk, _ in here} >= {one.id for one in again.chunks}


def test_what_there_is_no_room_for_is_fetched_as_far_as_it_is_seen(store: Path, in_folder: str) -> None:
    wanted, reads = read_here(store, fusion="reuse")
    open_shared(in_folder).close()
    keep_budget(local_place(in_folder), space.folder_bytes(local_place(in_folder)))
    for _ in range(2):
        reply, asked = asking(in_folder, fusion="reuse")
        same(reply, wanted)
        assert sorted(asked.first) == sorted(reads)
        assert asked.rest == []
    assert payloads(local_place(in_folder)) == {}


def test_a_store_in_front_that_another_writes_is_sent_what_is_seen(store: Path, in_folder: str) -> None:
    wanted, reads = read_here(store, fusion="reuse")
    open_shared(in_folder).close()
    told: list[str] = []
    with Store.open(local_place(in_folder)) as front, front.writer():
        reply, asked = asking(in_folder, told, fusion="reuse")
    same(reply, wanted)
    assert sorted(asked.first) == sorted(reads)
    assert asked.rest == []
    assert [text for text in told if "is being written" in text] == told != []
    assert payloads(local_place(in_folder)) == {}


def test_what_nobody_saw_is_damaged(store: Path, in_folder: str) -> None:
    """Check that the answer is there, and that the chunk is not kept, which is reported."""
    wanted, reads = read_here(store, fusion="reuse")
    chunk, _, layer = min(whole(reads) - {*reads})
    wreck(in_folder, chunk, "raw", layer)
    told: list[str] = []
    reply, asked = asking(in_folder, told, fusion="reuse")
    same(reply, wanted)
    assert (chunk, "raw", layer) in asked.rest
    assert [text for text in told if "not kept here" in text] != []
    here = {of for of, _ in payloads(local_place(in_folder))}
    assert here == {of for of, _, _ in reads} - {chunk}
    assert damages(local_place(in_folder)) == []


def test_what_is_seen_is_damaged(store: Path, in_folder: str) -> None:
    """Check that no more is fetched of a chunk that cannot become whole; the hole's rows see more of the others."""
    chunk = asking(store, fusion="reuse")[0].chunks[1].id
    wreck(in_folder, chunk, "raw", FULL)
    reply, asked = asking(in_folder, fusion="reuse")
    assert [one.id for one in reply.chunks if one.status == "miss"] == [chunk]
    assert chunk not in {of for of, _, _ in asked.rest}
    with Store.open(store) as opened, opened.writer() as writer:
        writer.drop_level([bytes.fromhex(chunk)], "raw")
    same(reply, asking(store, fusion="reuse")[0])


def test_a_tier_that_goes_when_the_answer_is_there(
    store: Path, in_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = read_here(store, fusion="reuse")
    real = Tier._rest

    def gone(self: Tier) -> Any:
        rest = real(self)
        shutil.rmtree(Path(in_folder.removeprefix("file://")))
        return rest

    monkeypatch.setattr(Tier, "_rest", gone)
    told: list[str] = []
    reply, _ = asking(in_folder, told, fusion="reuse")
    same(reply, wanted)
    assert told != []
    assert damages(local_place(in_folder)) == []


@pytest.mark.usefixtures("slow_machine")
def test_an_objective_has_whole_chunks_streamed(store: Path, in_folder: str) -> None:
    """Check that whole chunks are streamed: only afterwards it is known which layers are read."""
    wanted, reads = read_here(store, fusion="reuse")
    reply, asked = asking(in_folder, fusion="reuse", slo_ms=600_000.0)
    assert "miss" not in {one.status for one in reply.chunks}
    assert torch.equal(reply.fused.logits, wanted.fused.logits)
    assert {*asked.first} == whole(reads)
    assert asked.rest == []
    everything = sum(
        len(payload) for (chunk, _), payload in payloads(store).items() if (chunk, "raw", 0) in whole(reads)
    )
    assert reply.bytes_read + reply.bytes_spared == everything  # what was decoded meanwhile is read
    again, nothing = asking(in_folder, fusion="reuse", slo_ms=600_000.0)
    same(again, wanted)
    assert (nothing.first, nothing.rest) == ([], [])
