"""Files whose names no reader knows are read where their content is text that somebody wrote."""

from __future__ import annotations

import base64
import gzip
import random
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.corpus.readers import file_of, read_documents
from kvtool.core.corpus.readers.document import BinaryFile, EmptyFile, SecretFile, UnreadableFile
from kvtool.core.corpus.readers.text import SNIFFED, check
from tests.cli.working import kvtool, listing
from tests.wording import refused

WORDS = "Permission is hereby granted, free of charge, to any person who has a copy of this.\n"
PAGE = ".TH VISIT 7 2026-05\n.SH NAME\nvisit \\- walk around the mill\n"


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(
    "data",
    [
        WORDS.encode() * 2000,
        "Grüße aus Köln, wo die Mühle steht.\n".encode("cp1252"),
        "물레방아는 강가에 있다. 누가 지었는지 아무도 모른다.\n".encode("cp949"),
        WORDS.encode("utf-16"),
        "水車は川のそばに立っている。誰が建てたのかは誰も知らない。".encode(),
        b"1.2.3",
    ],
)
def test_text_is_taken_in_any_encoding(data: bytes) -> None:
    check(data[:SNIFFED], len(data))
    check(gzip.compress(data)[:SNIFFED], len(data))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x7fELF\2\1\1" + bytes(9) + noise(4000), BinaryFile),
        (noise(5000), BinaryFile),
        (base64.encodebytes(noise(5000)), BinaryFile),
        (b"function(b){return(b)};" * 3000, BinaryFile),
        (b"ghp_0123456789abcdefghijklmnopqrstuvwxyz\n", BinaryFile),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + base64.encodebytes(noise(400)), SecretFile),
        (b"A comment.\n-----BEGIN RSA PRIVATE KEY-----\n" + base64.encodebytes(noise(400)), SecretFile),
        (b"PuTTY-User-Key-File-3: ssh-ed25519\n", SecretFile),
        (b"# created: 2024-01-02\n# public key: age1ql3z\nAGE-SECRET-KEY-1QQPQZ\n", SecretFile),
        (b"---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nP2/56wAAA\n", SecretFile),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nQUJD\n".encode("utf-16"), SecretFile),
        (b" \n\t", EmptyFile),
    ],
)
def test_what_nobody_wrote_is_not(data: bytes, error: type[Exception]) -> None:
    for content in (data, gzip.compress(data)):
        with pytest.raises(error):
            check(content[:SNIFFED], len(content))


def test_a_long_text_has_to_be_named() -> None:
    with refused(BinaryFile, numbers=True):
        check(WORDS.encode() * 100, 1 << 25)


@pytest.mark.slow
def test_a_packed_file_is_read_as_what_it_holds() -> None:
    for name, data in (("visit.7", PAGE.encode()), ("visit", WORDS.encode()), ("visit.html", b"<p>An old mill.</p>")):
        (plain,) = read_documents(Path("/in") / name, data)
        (packed,) = read_documents(Path("/in") / f"{name}.gz", gzip.compress(data))
        assert (packed.text, packed.kind) == (plain.text, plain.kind)
        assert packed.source == f"/in/{name}.gz"
    (line,) = read_documents(Path("/in/a.jsonl.gz"), gzip.compress(b'{"id": "x", "text": "a"}'))
    assert file_of(line.source) == "/in/a.jsonl.gz"
    whole = gzip.compress(noise(5000))
    for damaged in (whole[:2000], whole[:-8] + bytes(8), b"no gzip", whole[:3]):
        with refused(UnreadableFile):
            read_documents(Path("/in/a.txt.gz"), damaged)
    with pytest.raises(EmptyFile):
        read_documents(Path("/in/a.txt.gz"), gzip.compress(b""))
    with refused(UnreadableFile, numbers=True):
        read_documents(Path("/in/a.txt.gz"), gzip.compress(bytes((1 << 28) + 1), 1))


def test_other_texts_stay_as_they_are() -> None:
    for text, kind in (
        (WORDS, "text"),
        (PAGE, "text"),
        (".hidden files\n", "text"),
        ("#!/bin/sh\necho mill\n", "code"),
    ):
        (document,) = read_documents(Path("/in/a.1"), text.encode())
        assert (document.text, document.kind) == (text, kind)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    (made / "COPYRIGHT-2026").write_text(WORDS)
    (made / "visit.7").write_text(PAGE)
    (made / "page.1.gz").write_bytes(gzip.compress(PAGE.encode()))
    (made / "backup.gz").write_bytes(gzip.compress(noise(4000)))
    (made / "prod.env.gz").write_bytes(gzip.compress(b"PASSWORD=mill"))
    (made / "all.tar.gz").write_bytes(gzip.compress(WORDS.encode()))
    (made / "mill.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><text>The old mill</text></svg>')
    (made / "rules.lst").write_text("no one enters\nthe mill at night\n")
    (made / "libmill.so.1").write_bytes(b"\x7fELF\2\1\1" + bytes(9) + noise(4000))
    (made / "weights.dat").write_bytes(noise(200_000))
    (made / "photo.png").write_bytes(b"\x89PNG")
    (made / "other.jpg").write_bytes(b"\xff\xd8")
    (made / "all.7z").write_bytes(b"PK\3\4")
    (made / "deploy").write_text("-----BEGIN RSA PRIVATE KEY-----\n" + "QUJD\n" * 30)
    (made / "id_rsa").write_text("A key.")
    (made / "prod.env").write_text("PASSWORD=mill")
    (made / "notes.txt~").write_text("The copy that an editor left.")
    return made


@pytest.mark.slow
def test_a_folder_of_such_files(folder: Path, fresh: Any, tmp_path: Path) -> None:
    done = fresh(folder).fine()
    read = {Path(document["source"]).name for document in listing(tmp_path / "fresh")}
    assert read == {"COPYRIGHT-2026", "visit.7", "page.1.gz", "mill.svg", "rules.lst"}
    assert {kind: count for kind, count in done.json["skipped"].items() if count} == {
        "unsupported": 7, "secret": 4, "lock": 1,
    }  # fmt: skip
    assert done.json["unsupported"] == {"archive": 2, "binary": 3, "image": 2}
    again = fresh(folder).fine().json  # and none of the others is taken for a failure then
    assert (again["skipped"], again["documents"]["unchanged"]) == (done.json["skipped"], 5)
    told = kvtool("ingest", folder, "--store", tmp_path / "fresh", "-v").fine()
    assert "files skipped: 1 lock, 4 secret, 2 archives, 2 images, 3 binary\n" in told.out
    assert f"skipped {folder}/weights.dat: binary" in told.err
    assert f"skipped {folder}/deploy: holds a private key" in told.err


@pytest.mark.slow
def test_a_key_is_found_behind_the_first_bytes_and_a_packed_text_is_not_too_long(fresh: Any, tmp_path: Path) -> None:
    made, key = tmp_path / "keys", b"-----BEGIN OPENSSH PRIVATE KEY-----\nQUJD\n"
    made.mkdir()
    (made / "fine.txt").write_text(WORDS)
    (made / "late.lst").write_bytes(WORDS.encode() * 1000 + key)
    (made / "late.gz").write_bytes(gzip.compress(WORDS.encode() * 1000 + key))
    (made / "second.gz").write_bytes(gzip.compress(WORDS.encode()) + gzip.compress(key))
    (made / "long.gz").write_bytes(gzip.compress(WORDS.encode() * (1 << 18)))
    for _ in range(2):
        skipped = fresh(made, "--dry-run").fine().json["skipped"]
        assert {kind: count for kind, count in skipped.items() if count} == {"unsupported": 1, "secret": 3}


@pytest.mark.slow
def test_what_is_named_is_taken(folder: Path, fresh: Any) -> None:
    (folder / "long.lst").write_text("x" * 5000)
    assert fresh(folder / "long.lst").fine().json["documents"]["added"] == 1
    assert fresh(folder, "--include", "*.lst").fine().json["documents"]["added"] == 1
    assert fresh(folder / "deploy").fine().json["documents"]["added"] == 1
