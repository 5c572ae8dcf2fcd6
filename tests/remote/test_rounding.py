"""Levels of one chunk, and their measured losses, that were made on two machines, which round in different ways."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.cache.record import KVHeader, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.codec import CODECS
from kvtool.core.common.types import Events
from kvtool.core.compress.job import LevelWriter
from kvtool.core.compress.loss import HeavyRows
from kvtool.core.compress.options import CompressOptions, CompressReport
from kvtool.core.errors import DamagedError
from kvtool.core.records.read import read_chunk
from kvtool.core.remote import values
from kvtool.core.remote.blobs import Blobs, open_blobs
from kvtool.core.remote.catalogue import HEAD
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.mirror import local_place, open_shared
from kvtool.core.remote.options import PullOptions, PushOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.session.identity import ProfileCache
from tests.codec.synthetic import KV, encoded, model, profile
from tests.remote.serving import wreck
from tests.stores import LAYERS, MANIFEST, TOKENS, id_of, info_of, make_store, new_store

CHUNK = id_of("f0.0")


def kv_of(layer: int, machine: int) -> KV:
    keys, values = model().kv(layer, TOKENS)
    noise = torch.Generator().manual_seed(machine)
    return keys + 0.3 * machine * torch.rand(keys.shape, generator=noise), values


def compressed(path: Path, levels: Sequence[str], machine: int) -> Path:
    """Make a store whose first chunk is there at some levels, each refining the next coarser one of them."""
    with Store.open(make_store(path)) as store, store.writer() as writer:
        writer.set_manifest(MANIFEST)
        of = profile()
        writer.put_profile(of.digest, of.data, {"profile": of.digest.hex()})
        made = [encoded(*kv_of(layer, machine), levels, of, layer) for layer in range(LAYERS)]
        for level in levels:
            records = []
            for layer, one in enumerate(made):
                heads, tokens, dim = one[level].shape
                header = KVHeader("float32", heads, tokens, dim, dim, level, layer)
                records.append(encode_record(CHUNK, header, [one[level].payload]))
            writer.put_chunk(CHUNK, info_of("f0.0"), level, records)
    return path


def read(store: Store, level: str) -> torch.Tensor:
    return torch.stack(list(read_chunk(store, CHUNK, level, LAYERS, ProfileCache(store)).keys))


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Blobs]:
    with closing(open_blobs(f"file://{tmp_path / 'shared'}")) as opened:
        yield opened


def sent(path: Path, blobs: Blobs, **options: bool) -> dict[str, torch.Tensor]:
    with Store.open(path) as store:
        push(store, blobs, PushOptions(**options))
        return {level: read(store, level) for level in store.levels(CHUNK) if level != "raw"}


def test_a_level_is_pulled_with_the_very_one_that_it_refines(blobs: Blobs, tmp_path: Path) -> None:
    theirs = sent(compressed(tmp_path / "one", ["1", "2", "3"], machine=0), blobs)
    place = compressed(tmp_path / "other", ["3", "4"], machine=1)
    with Store.open(place) as store:
        own = read(store, "4")
        report = pull(place, blobs, PullOptions(mine=True))
        assert report.damaged == []
        assert report.chunks.transferred == 3
        for level, found in theirs.items():
            assert torch.equal(read(store, level), found)
        assert torch.equal(read(store, "4"), own)  # it refines no other: nothing sound is lost
        assert store.levels(CHUNK) == ["1", "2", "3", "4", "raw"]
        assert pull(place, blobs, PullOptions(mine=True)).chunks.transferred == 0


def test_what_refines_nothing_of_theirs_stays(blobs: Blobs, tmp_path: Path) -> None:
    sent(compressed(tmp_path / "one", ["1", "3"], machine=0), blobs)
    place = compressed(tmp_path / "other", ["2", "3"], machine=1)
    with Store.open(place) as store:
        own = {level: read(store, level) for level in ("2", "3")}
        assert pull(place, blobs, PullOptions(mine=True)).chunks.transferred == 1
        assert all(torch.equal(read(store, level), found) for level, found in own.items())
        read(store, "1")


def test_a_base_that_is_damaged_there_takes_nothing_away_here(blobs: Blobs, tmp_path: Path) -> None:
    sent(compressed(tmp_path / "one", ["1", "2"], machine=0), blobs)
    wreck(blobs.url, CHUNK.hex(), "2")
    place = compressed(tmp_path / "other", ["2", "3"], machine=1)
    with Store.open(place) as store:
        own = {level: read(store, level) for level in ("2", "3")}
        report = pull(place, blobs, PullOptions(mine=True))
        assert [row["subject"] for row in report.damaged] == [f"chunk {CHUNK.hex()} at level 2, 1"]
        assert all(torch.equal(read(store, level), found) for level, found in own.items())
    assert [row["subject"] for row in pull(tmp_path / "new", blobs, PullOptions(mine=True)).damaged] == [
        f"chunk {CHUNK.hex()} at level {level}" for level in "21"
    ]


def test_levels_that_do_not_belong_together_are_not_sent(blobs: Blobs, tmp_path: Path) -> None:
    one = compressed(tmp_path / "one", ["1", "2"], machine=0)
    with Store.open(one) as store, Store.open(compressed(tmp_path / "other", ["2"], machine=1)) as other:
        records = [other.read_kv(CHUNK, "2", layer) for layer in range(LAYERS)]
        with store.writer() as writer:
            made = [encode_record(CHUNK, found[0], [found[1]]) for found in records if found is not None]
            writer.put_chunk(CHUNK, info_of("f0.0"), "2", made, replace=True)
        with pytest.raises(DamagedError):
            read(store, "1")
        read(store, "2")
        report = push(store, blobs)
        assert [row["subject"] for row in report.damaged] == [f"chunk {CHUNK.hex()} at level 1"]
    assert sorted(read_catalogue(blobs).chunks[CHUNK.hex()].levels) == ["2", "raw"]


def test_an_unknown_level_between_two_that_belong_together(tmp_path: Path) -> None:
    with Store.open(compressed(tmp_path / "one", ["1", "2"], machine=0)) as store, store.writer() as writer:
        headers = [KVHeader("float32", 1, TOKENS, 2, 2, "1bit", layer) for layer in range(LAYERS)]
        writer.put_chunk(CHUNK, info_of("f0.0"), "1bit", [encode_record(CHUNK, one, [b"theirs"]) for one in headers])
        writer.flush()
        damaged: list[str] = []
        surveyed = values.Survey(store, lambda what, why: damaged.append(f"{what}: {why}")).catalogue()
        assert damaged == []
        assert sorted(surveyed.chunks[CHUNK.hex()].levels) == ["1", "1bit", "2", "raw"]


def test_a_store_in_front_drops_what_is_no_longer_the_tiers(blobs: Blobs, tmp_path: Path) -> None:
    """Hold a level of one machine; another one has pushed its own, and what refines that."""
    sent(compressed(tmp_path / "one", ["2"], machine=0), blobs)
    with open_shared(blobs.url) as tier:
        read(tier, "2")
        tier.note_access([CHUNK])
    with Store.open(local_place(blobs.url)) as front:
        assert front.levels(CHUNK) == ["2"]
    theirs = sent(compressed(tmp_path / "other", ["1", "2"], machine=1), blobs)
    with open_shared(blobs.url) as tier:
        assert tier.sizes_here(CHUNK) == {}
        for level in ("1", "2"):
            assert torch.equal(read(tier, level), theirs[level])
        tier.note_access([CHUNK])
    with open_shared(blobs.url) as tier:
        assert list(tier.sizes_here(CHUNK)) == ["1", "2"]


def test_what_was_made_elsewhere_is_not_refined_here(tmp_path: Path) -> None:
    """Encode a finer level without a base: the exact record is this machine's, the stored level another's."""
    with Store.open(compressed(tmp_path / "one", ["2", "3"], machine=0)) as store, store.writer() as writer:
        exact = []
        for layer in range(LAYERS):
            keys, values = kv_of(layer, machine=1)
            header = KVHeader("float32", *keys.shape[:2], keys.shape[2], keys.shape[2], "raw", layer)
            exact.append(encode_record(CHUNK, header, CODECS["raw"].encode_layers([(keys, values)])[0]))
        writer.put_chunk(CHUNK, info_of("f0.0"), "raw", exact, replace=True)
        writer.flush()
        before = read(store, "2")
        report, events = CompressReport(), Events()
        heavy = HeavyRows(None)  # type: ignore[arg-type] # no level leaves rows out
        LevelWriter(store, writer, profile(), CompressOptions(), report, events, heavy).run([CHUNK], ["1"])
        assert report.warnings == []
        assert torch.equal(read(store, "2"), before)
        difference = (read(store, "1") - read(store, "raw")).norm() / read(store, "raw").norm()
        assert difference < (before - read(store, "raw")).norm() / read(store, "raw").norm()


# ---- measured losses ---------------------------------------------------------------------------------------------


MINE, THEIRS, NONE = "aa" * 16, "bb" * 16, "00" * 16


def loss(nats: float) -> dict[str, float]:
    return {"kl_answer": nats, "questions": 8.0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(new_store(tmp_path / "store", files=2)) as opened:
        yield opened


def know(store: Store, codec: dict[str, Any]) -> None:
    with store.writer() as writer:
        writer.set_codec_state(codec)


def seen(url: str) -> dict[str, Any]:
    with open_shared(url) as tier:
        return tier.codec_state()


def test_what_is_measured_later_reaches_the_store_in_front(store: Store, blobs: Blobs) -> None:
    first = {"profile": MINE, "losses": {MINE: {"2": loss(0.5)}}}
    know(store, first)
    push(store, blobs)
    assert seen(blobs.url) == first
    later = {"profile": THEIRS, "losses": {THEIRS: {"3": loss(0.001)}}}
    know(store, later)
    push(store, blobs)
    assert seen(blobs.url) == later


@pytest.mark.parametrize(
    "own", [{}, {"profile": "", "losses": {}}, {"profile": "", "losses": {NONE: {"1": loss(0.1)}}}]
)
def test_a_push_without_a_profile_leaves_the_tiers(own: dict[str, Any], store: Store, blobs: Blobs) -> None:
    digest = hashlib.blake2b(b"profile", digest_size=16).digest()
    know(store, {"profile": digest.hex(), "losses": {digest.hex(): {"2": loss(0.001)}}})
    with store.writer() as writer:
        writer.put_profile(digest, b"profile")
    push(store, blobs)
    with store.writer() as writer:
        writer.drop_profiles([digest])
        writer.drop_level(store.chunk_ids(), "raw")
    know(store, own)
    push(store, blobs)
    there = seen(blobs.url)
    assert there["profile"] == digest.hex()
    assert there["losses"] == {digest.hex(): {"2": loss(0.001)}} | own.get("losses", {})
    head = blobs.get([HEAD])
    push(store, blobs)
    assert blobs.get([HEAD]) == head


def test_a_pulled_store_keeps_its_own_and_learns_the_rest(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    know(store, {"profile": MINE, "losses": {MINE: {"1": loss(0.1), "3": loss(0.3)}}})
    push(store, blobs)
    place = tmp_path / "other"
    with Store.open(new_store(place)) as other:
        know(other, {"profile": MINE, "losses": {MINE: {"1": loss(0.2)}}})
        pull(place, blobs, PullOptions(mine=True))
        assert other.codec_state() == {"profile": MINE, "losses": {MINE: {"1": loss(0.2), "3": loss(0.3)}}}
