"""Packs: an import gives what was exported, bit for bit; nothing damaged or hostile is imported."""

from __future__ import annotations

import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtool as kvtool_api
from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.record import Kind
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import NESTED
from kvtool.core.errors import DamagedError, NoSpaceError, StoreNotFoundError, UsageError
from kvtool.core.remote import catalogue, packs
from kvtool.core.remote.options import ImportOptions
from kvtool.core.remote.packs import export, take
from tests.cli.working import chunks_of, damages, kvtool, listing, prefix_chunk
from tests.compress.making import flip, levels_in, losses_of, make_fitted, make_plain, replace_record, rows
from tests.wording import refused


@pytest.fixture(scope="module")
def fitted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = make_plain(tiny, tmp_path_factory.mktemp("plain"))
    path = make_fitted(plain, tmp_path_factory.mktemp("fitted"))
    with Store.open(path) as store, store.writer() as writer:
        state = store.codec_state()
        writer.set_codec_state(state | {"losses": {state["profile"]: {"2": {"kl_answer": 0.004}}}})
    return path


@pytest.fixture(scope="module")
def packed(fitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pack = tmp_path_factory.mktemp("pack") / "all.kvpack"
    assert export(fitted, pack).damaged == []
    return pack


@pytest.fixture
def pack(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(packed, tmp_path / "copy.kvpack"))


def test_another_format_is_refused(fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "FORMAT", 2)
        export(fitted, tmp_path / "other.kvpack")
    done = kvtool("store", "import", tmp_path / "other.kvpack", "--store", tmp_path / "new")
    done.failed(12)
    assert not (tmp_path / "new").exists()


def contents(path: Path) -> tuple[object, ...]:
    with Store.open(path) as store:
        documents = [(one.source, one.kind, one.text, one.chunks) for one in store.documents()]
        infos = [(chunk, store.chunk_info(chunk)) for chunk in store.chunk_ids()]
        facts = store.manifest(), store.codec_state(), store.profile_digests(), list(store.files())
    return documents, infos, facts, [rows(path, level) for level in ("raw", *NESTED)]


def test_a_store_comes_back_bit_for_bit(fitted: Path, pack: Path, tmp_path: Path) -> None:
    with kvtool_api.open(tmp_path / "new") as cache:
        assert cache.import_(pack, mine=True).damaged == []
        assert cache.export(tmp_path / "back.kvpack").documents == 2
    assert (tmp_path / "back.kvpack").read_bytes() == pack.read_bytes()
    assert contents(tmp_path / "new") == contents(fitted)
    assert damages(tmp_path / "new") == []
    assert losses_of(tmp_path / "new", chunks_of(fitted, "mill0.md")[0]) == {"2": 0.004}
    again = take(tmp_path / "new", pack)
    assert (again.files.transferred, again.chunks.transferred, again.damaged) == (0, 0, [])
    assert again.files.unchanged == 2


def test_raw_kv_is_read_as_the_page_says(fitted: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = files("kvtool").joinpath("docs/guide/packs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    pack.rename(pack.with_name("corpus.kvpack"))
    monkeypatch.chdir(pack.parent)
    read: dict[str, Any] = {}
    exec(compile(code, "packs.md", "exec"), read)
    with Store.open(fitted) as store:
        header, payload = store.read_kv(bytes.fromhex(read["chunk"]), "raw", 0)  # type: ignore[misc]
        assert read["keys"].shape == (header.kv_heads, header.tokens, header.head_dim_k)
        keys = read["keys"].view(-1).view(torch.uint8).numpy().tobytes()
        assert keys == bytes(payload[: len(keys)])


def test_a_part_of_a_store(fitted: Path, tmp_path: Path) -> None:
    """A level comes with those that it refines, the prompt's own beginning always; others stay where they are."""
    part = tmp_path / "part.kvpack"
    done = kvtool(
        "store", "export", part, "--store", fitted, "--level", "3", "--only", "*mill1.md", "mill1.md", "--json"
    ).fine()
    assert (done.json["documents"], done.json["bytes"]) == (1, part.stat().st_size)
    new = ("--store", tmp_path / "new")
    kvtool("store", "import", part, *new, "--mine").fine()
    assert [Path(one["source"]).name for one in listing(tmp_path / "new")] == ["mill1.md"]
    found = levels_in(tmp_path / "new")
    assert found.pop(prefix_chunk(tmp_path / "new")) == ["raw"]
    assert {tuple(levels) for levels in found.values()} == {("3", "4")}
    kvtool("store", "export", tmp_path / "all.kvpack", "--store", fitted).fine()
    row = kvtool("store", "import", tmp_path / "all.kvpack", *new, "--mine", "--json").fine().json
    assert row["direction"] == "import"
    assert (row["files"], row["chunks"]["unchanged"]) == ({"transferred": 1, "unchanged": 1}, 2 * len(found) + 1)
    assert contents(tmp_path / "new") == contents(fitted)


def test_files_are_replaced_with_force_only(fitted: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.kvpack"
    target.write_text("mine")
    kvtool("store", "export", target, "--store", fitted).failed(2, "--force")
    assert target.read_text() == "mine"
    kvtool("store", "export", target, "--store", fitted, "--force").fine()
    assert zipfile.is_zipfile(target)
    assert os.stat(target).st_mode & 0o077 == 0
    kvtool("store", "export", tmp_path / "no" / "x.kvpack", "--store", fitted).failed(2)
    kvtool("store", "export", tmp_path / "x", "--store", fitted, "--only", "nothing.md").failed(2)
    kvtool("store", "export", tmp_path / "x", "--store", tmp_path / "none").failed(10)
    kvtool("store", "import", tmp_path / "none.kvpack", "--store", tmp_path / "new").failed(2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["there.kvpack"]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    kvtool("store", "export", fifo, "--store", fitted, "--force").failed(2)
    assert fifo.is_fifo()
    (data,) = (fitted / "data").glob("*/data.mdb")
    kvtool("store", "export", data, "--store", fitted, "--force").failed(2)
    assert damages(fitted) == []


def test_a_full_disk_leaves_nothing(fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packs.os, "fsync", full)
    with pytest.raises(NoSpaceError):
        export(fitted, tmp_path / "x.kvpack")
    assert list(tmp_path.glob("*kvpack*")) == list(tmp_path.glob(".tmp*")) == []


def test_the_budget_holds(pack: Path, tmp_path: Path) -> None:
    kvtool("store", "import", pack, "--store", tmp_path / "new", "--max-size", "600kB").failed(14)
    assert damages(tmp_path / "new") == []


def change(pack: Path, name: str, edit: Callable[[bytes], bytes], **facts: Any) -> None:
    """Change the first value whose name begins so; `kv` is a pack of KV, `described` one of descriptions."""
    with zipfile.ZipFile(pack) as old:
        members = {one.filename: old.read(one) for one in old.infolist()}
    (found,) = [one for one, value in members.items() if kind_of(one, value).startswith(name)][:1]
    with zipfile.ZipFile(pack, "w") as new:
        for member, data in members.items():
            new.writestr(member, edit(data) if member == found else data, **(facts if member == found else {}))


def kind_of(name: str, value: bytes) -> str:
    is_pack = name.startswith("pack/")
    return name if not is_pack else "kv" if value[5] == Kind.KV else "described"


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("name", ["head", "catalogue", "meta/manifest"])
def test_a_damaged_index_is_refused_before_anything_is_written(name: str, pack: Path, tmp_path: Path) -> None:
    change(pack, name, flipped)
    kvtool("store", "import", pack, "--store", tmp_path / "new").failed(13)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("cut", [0, 100, 0.5, -1])
def test_a_pack_that_is_cut_off(cut: float, pack: Path, tmp_path: Path) -> None:
    data = pack.read_bytes()
    pack.write_bytes(data[: int(cut * len(data)) if 0 < cut < 1 else int(cut)])
    kvtool("store", "import", pack, "--store", tmp_path / "new").failed(13, "pack")
    assert not (tmp_path / "new").exists()


def test_every_flipped_bit_is_found(packed: Path, tmp_path: Path) -> None:
    data, pack = packed.read_bytes(), tmp_path / "x.kvpack"
    take(tmp_path / "whole", packed, ImportOptions(mine=True))
    whole = contents(tmp_path / "whole")
    for number in range(12):
        at = (len(data) - 1) * number // 11
        pack.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        new = tmp_path / f"new{number}"
        try:
            report = take(new, pack, ImportOptions(mine=True))
        except DamagedError:
            assert not new.exists()
            continue
        assert damages(new) == []
        assert report.damaged or contents(new) == whole
        for level in ("raw", *NESTED):
            assert rows(new, level).items() <= rows(tmp_path / "whole", level).items()
        shutil.rmtree(new)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("kv", flipped),
        ("kv", lambda data: data[:24] + b"\xff" * 20 + data[44:]),
        ("kv", lambda data: data[:48] + (2**62).to_bytes(8, "little") + data[56:]),
        ("kv", lambda data: b"\0" + data),
        ("kv", lambda data: b""),
        ("described", flipped),
        ("described", lambda data: data[:-1]),
        ("profile/", flipped),
    ],
)
def test_damaged_member_is_left_out(name: str, edit: Callable[[bytes], bytes], pack: Path, tmp_path: Path) -> None:
    change(pack, name, edit)
    done = kvtool("store", "import", pack, "--store", tmp_path / "new", "--json")
    assert done.code == 13
    assert done.json["damaged"]
    assert "left out: " in done.err
    assert damages(tmp_path / "new") == []


def test_what_stands_before_a_member_is_part_of_it(pack: Path) -> None:
    """The zip format says things twice, and readers look at one of them: a flip in the other is damage all the same."""
    with zipfile.ZipFile(pack) as read:
        member = next(one for one in read.infolist() if one.filename.startswith("pack/"))
    whole = pack.read_bytes()
    for at in range(30):
        data = bytearray(whole)
        data[member.header_offset + at] ^= 2
        pack.write_bytes(data)
        with packs.opened_archive(pack) as blobs:
            assert blobs.get([member.filename]) == [b""], at
            assert [*blobs.fetch([BlobRequest("", 10, member.filename, 5)])] == [(0, b"")], at


def test_a_bomb_is_not_unpacked(pack: Path, tmp_path: Path) -> None:
    change(pack, "kv", lambda data: bytes(2**26), compress_type=zipfile.ZIP_DEFLATED)
    assert take(tmp_path / "new", pack).damaged
    assert damages(tmp_path / "new") == []


def test_a_catalogue_does_not_unpack_to_gigabytes(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.remote.packs._MOST_CATALOGUE", 1000)
    with pytest.raises(DamagedError):
        take(tmp_path / "new", pack)
    assert not (tmp_path / "new").exists()


def test_of_two_members_with_a_name_the_last_counts(pack: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack, "a") as opened, warnings.catch_warnings(action="ignore"):
        opened.writestr("head", b"another")
    with pytest.raises(DamagedError):
        take(tmp_path / "new", pack)


def test_a_part_that_ends_beyond_its_member(pack: Path) -> None:
    with packs.opened_archive(pack) as blobs:
        (name, *_) = blobs.names("pack/")
        (size,) = blobs.sizes([name])
        parts = [BlobRequest("", 100, name, at) for at in (size - 1, size, size + 2**40)]
        assert [len(value or b"") for _, value in blobs.fetch([*parts, BlobRequest(name, size - 1)])] == [1, 0, 0, 0]


def test_names_are_never_paths(pack: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack, "a") as opened:
        opened.writestr("../../escaped", "x")
        opened.writestr("/tmp/kvtool-escaped", "x")
    assert take(tmp_path / "deep" / "new", pack).damaged == []
    assert not (tmp_path / "escaped").exists()
    assert not Path("/tmp/kvtool-escaped").exists()


def test_what_the_store_cannot_give_is_left_out(fitted: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(fitted, tmp_path / "store"))
    chunk = chunks_of(path, "mill0.md")[0]
    replace_record(path, chunk, "4", 1, flip)
    done = kvtool("store", "export", tmp_path / "x.kvpack", "--store", path, "--json")
    assert done.code == 13
    assert all(chunk in row["subject"] for row in done.json["damaged"])
    assert take(tmp_path / "new", tmp_path / "x.kvpack").damaged == []
    assert "4" not in levels_in(tmp_path / "new")[chunk]


def test_what_is_no_pack(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as photos:
        photos.writestr("holiday.txt", "sunny")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, error in (("photos.zip", UsageError), ("fifo", UsageError), ("folder", StoreNotFoundError)):
        with refused(error):
            take(tmp_path / "new", tmp_path / name)
    assert not (tmp_path / "new").exists()
