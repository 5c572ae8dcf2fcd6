"""Records of many chunks in one value: what is read of it, and what becomes of it when chunks go."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError
from kvtool.core.remote import send, values
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import Catalogue, records_wanted
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.options import PushOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.remote.test_sharing import is_whole
from tests.spying import calls_of
from tests.stores import LAYERS, add, add_file, check_file, forget, id_of, new_store, put, records_of
from tests.wording import refused


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(new_store(tmp_path / "store")) as opened:
        with opened.writer() as writer:
            put(writer, "f0.0", "lossless")
        yield opened


def packs_in(blobs: Blobs) -> list[str]:
    return sorted(blobs.names("pack/"))


def check_pulled(blobs: Blobs, place: Path, *files: str, more: int = 0) -> None:
    assert pull(place, blobs).damaged == []
    with Store.open(place) as pulled:
        assert pulled.sources()[: len(files)] == [*files]
        assert len(pulled.sources()) == len(files) + more
        for file in files:
            check_file(pulled, file)


def test_a_pack_for_each_level_in_the_order_of_documents(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    report = push(store, blobs)
    assert (report.chunks.transferred, list(blobs.names("kv/"))) == (7, [])
    assert len(packs_in(blobs)) == 3  # descriptions in one
    catalogue = read_catalogue(blobs)
    keys = [id_of(f"f{file}.{number}").hex() for file in range(3) for number in range(2)]
    wanted = [one for key in keys for one in records_wanted(key, catalogue.chunks[key], "raw")]
    assert {one.pack for one in wanted} < set(packs_in(blobs))
    assert [one.start for one in wanted[1:]] == [*accumulate(one.most for one in wanted[:-1])]
    (whole,) = blobs.get([wanted[0].pack])
    assert whole == b"".join(record for file in range(3) for n in range(2) for record in records_of(f"f{file}.{n}"))
    check_pulled(blobs, tmp_path / "pulled", "f0", "f1", "f2")
    assert push(store, blobs).bytes == 0


def test_packs_sent_together(store: Store, blobs: Blobs, small_packs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = calls_of(monkeypatch, blobs, "put", lambda values: sum(name.startswith("pack/") for name in values))
    monkeypatch.setattr(send, "PACK_BYTES", sum(map(len, records_of("f0.0"))))
    push(store, blobs)
    assert 1 < max(sent) < sum(sent)
    assert is_whole(blobs)


def test_large_chunk_goes_by_layer(store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.writer() as writer:
        add_file(writer, "large", ["large"], dim=64)
    monkeypatch.setattr(send, "MOST_BYTES", 3000)
    push(store, blobs)
    assert len(list(blobs.names("kv/"))) == LAYERS
    assert push(store, blobs).bytes == 0
    assert pull(tmp_path / "pulled", blobs).chunks.transferred == 8


def test_packs_are_deleted_when_nothing_in_them_is_used(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    push(store, blobs)
    first = packs_in(blobs)
    forget(store, "f1", "f2")
    add(store, "f0", "f0.0", "new")
    for number in range(6):
        add(store, "f9", f"version {number}")
        forget(store)
        push(store, blobs, PushOptions(delete=number == 0, yes=True))
    assert is_whole(blobs)
    assert {*first} <= {*packs_in(blobs)}  # of f0.0
    assert len(packs_in(blobs)) == len(first) + 2 * 4  # of each catalogue that is kept, and of "new"
    assert pull(tmp_path / "pulled", blobs).damaged == []
    forget(store, "f0")
    push(store, blobs, PushOptions(delete=True, yes=True))
    assert {*first}.isdisjoint(packs_in(blobs))


def levels_of(blobs: Blobs, name: str) -> set[str]:
    return {
        level
        for chunk in read_catalogue(blobs).chunks.values()
        for level, stored in chunk.levels.items()
        if stored.place is not None and stored.place.pack.name == name
    }


def test_lost_pack_is_pushed_again_by_both_stores(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    push(store, blobs)
    check_pulled(blobs, tmp_path / "part", "f0", "f1", "f2")
    with Store.open(tmp_path / "part") as part:
        forget(part, "f0")
        blobs.delete([name for name in packs_in(blobs) if levels_of(blobs, name)])
        assert push(part, blobs).chunks.transferred == 4
        assert not is_whole(blobs)  # of f0 nothing is here
        damaged = {row["subject"] for row in pull(tmp_path / "less", blobs).damaged}
        assert damaged == {
            f"chunk {id_of(f'f0.{n}').hex()} at level {level}" for n, level in ((0, "raw"), (1, "raw"), (0, "lossless"))
        }
    push(store, blobs)
    assert is_whole(blobs)
    check_pulled(blobs, tmp_path / "whole", "f0", "f1", "f2")


def test_rm_during_a_push(store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, "f3", "f0.0", "f0.1")

    survey = values.Survey.catalogue

    def surveyed(*given: Any, **more: Any) -> Catalogue:
        found = survey(*given, **more)
        forget(store, "f3")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(values.Survey, "catalogue", surveyed)
        with refused(KvtoolError):
            push(store, blobs)
    push(store, blobs)
    check_pulled(blobs, tmp_path / "whole", "f0", "f1", "f2")
