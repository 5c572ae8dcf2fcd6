"""ZIP archives: their files as documents, and what is not read of them."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvtool.core.common.marks import place_of
from kvtool.core.common.plugins import extra_line
from kvtool.core.corpus import readers
from kvtool.core.corpus.readers import archive, file_of, kind_of, read_documents
from kvtool.core.corpus.readers.document import BinaryFile, Document, MissingPackage, UnreadableFile
from kvtool.core.corpus.reading import Reading
from tests.support.office.facts import facts
from tests.support.office.writers import WRITERS
from tests.wording import refused

SOURCE = "/in/a.zip"


def packed(members: Mapping[str, bytes | str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)
    return made.getvalue()


def read(data: bytes) -> list[Document]:
    return read_documents(Path(SOURCE), data)


def names(documents: list[Document]) -> list[str]:
    return [document.source.removeprefix(SOURCE) for document in documents]


def test_each_file_is_a_document_with_its_own_places(tmp_path: Path) -> None:
    WRITERS["odt"](tmp_path / "a.odt", next(facts("en")))
    rows = b'{"id": "x#1", "text": "The mill."}\n{"text": "The weir."}\n'
    members = {
        "notes/tide.md": b"# Tide\n\nHigh at nine.\n",
        "README": b"Read me.\n",
        "rows.jsonl": rows,
        "b#1.txt": b"Hash.\n",
        "report.odt": (tmp_path / "a.odt").read_bytes(),
    }
    documents = read(packed(members))
    assert names(documents) == [
        *("#notes/tide.md", "#README", "#rows.jsonl#x#1", "#rows.jsonl#2", "#b#1.txt", "#report.odt")
    ]
    assert {file_of(document.source) for document in documents} == {SOURCE}
    tide, report = documents[0], documents[-1]
    assert place_of(tide.text, tide.marks, 8, 20).cite(tide.source) == f"{SOURCE}#notes/tide.md:3"
    assert report.marks[0].place == "¶ 1"
    assert documents[0].notes == ()


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("/in/a.jsonl#7", "/in/a.jsonl"),
        ("/in/a.jsonl#x#7", "/in/a.jsonl"),
        ("/in/a.zip#b/c.mbox#2", "/in/a.zip"),
        ("/in/a#b.md", "/in/a#b.md"),
        ("/c#/a.jsonl#1", "/c#/a.jsonl"),
        ("/in/a.md", "/in/a.md"),
    ],
)
def test_file_of_a_document(source: str, file: str) -> None:
    assert file_of(source) == file


def test_other_members_are_counted_by_kind() -> None:
    members = {
        "a.txt": b"Read.",
        **{f"{number}.png": b"\x89PNG" for number in range(3)},
        "inner.zip": packed({"b.txt": b"Not read."}),
        "old.tar.gz": b"\x1f\x8b",
        "tool.exe": b"MZ",
        "id_rsa": b"key",
        "yarn.lock": b"lock",
        "blob.qqq": b"?",
        ".hidden.txt": b"hidden",
        "__MACOSX/._a.txt": b"fork",
        "empty.txt": b"",
        "folder/": b"",
    }
    (document,) = read(packed(members))
    assert document.notes == ("pictures: 3, archives: 2, other files: 2, secrets: 1, lock files: 1 not read",)


def test_a_damaged_or_protected_member_is_named_and_the_others_are_read() -> None:
    data = bytearray(
        packed({"bad.docx": b"PK no", "locked.txt": b"secret", "fine.txt": b"Fine.", "cut.txt": b"Cut here."})
    )
    at = data.index(b"Cut here.")
    data[at : at + 3] = b"xxx"  # its checksum is wrong
    for sign, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        begin = data.index(b"locked.txt", 0 if offset == 6 else data.index(b"PK\1\2")) - (30 if offset == 6 else 46)
        assert data[begin : begin + 4] == sign
        data[begin + offset] |= 1
    (document,) = read(bytes(data))
    assert document.text == "Fine."
    assert [note.partition(":")[0] for note in document.notes] == ["bad.docx", "locked.txt", "cut.txt"]
    assert "locked.txt: protected by a password" in document.notes


def test_names_of_members() -> None:
    data = packed({"../../up.txt": b"a", "/abs.txt": b"b", "caf\xe9.txt": b"c"})
    assert names(read(data)) == ["#up.txt", "#abs.txt", "#café.txt"]
    for encoding in ("cp437", "utf-8"):  # without the flag that says which
        raw = packed({"XXXXX.txt": b"text"}).replace(b"XXXXX", "café".encode(encoding).ljust(5, b"_"))
        assert names(read(raw)) in (["#café_.txt"], ["#café.txt"])
    (document,) = read(packed({"a.txt": b"Fine."} | {f"{number}.pdf": b"%PDF" for number in range(30)}))
    assert len(document.notes) == 21
    assert document.notes[-1] == "and 10 more like these"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        new.writestr("a.txt", "first")
        with pytest.warns(UserWarning, match="Duplicate"):
            new.writestr("a.txt", "second")
    (document,) = read(made.getvalue())
    assert document.notes == ("files of the same name: 1 not read",)


@pytest.mark.parametrize("ending", ["docx", "xlsx", "pptx", "odt", "epub"])
def test_an_office_file_under_the_name_of_an_archive_is_read_as_one(ending: str, tmp_path: Path) -> None:
    WRITERS[ending](tmp_path / f"a.{ending}", next(facts("en")))
    data = (tmp_path / f"a.{ending}").read_bytes()
    (document,) = read(data)
    (same,) = read_documents(Path(f"/in/a.{ending}"), data)
    assert (document.source, document.text) == (SOURCE, same.text)


def test_an_archive_of_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MOST_FILES", 3)
    monkeypatch.setattr(archive, "_MOST_TEXT", 100)
    assert len(read(packed({f"{number}.txt": b"a" * 30 for number in range(3)}))) == 3
    for members in ({f"{number}.txt": b"a" for number in range(4)}, {"a.txt": b"a " * 51}):
        with refused(BinaryFile):
            read(packed(members))


def test_an_archive_without_a_document_is_refused() -> None:
    for members in ({"a.png": b"\x89PNG"}, {}):
        with refused(BinaryFile, numbers=True):
            read(packed(members))
    with refused(UnreadableFile):
        read(b"PK\3\4 cut off")
    assert kind_of(Path("a.zip")) == "archive"


def test_a_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    (document,) = read(packed({"a.md": b"A text.\n", "b.pdf": b"%PDF-1.4\n"}))
    assert document.notes == (f"b.pdf: pypdfium2 is not installed ({extra_line('documents')})",)
    with pytest.raises(MissingPackage):
        read(packed({"b.pdf": b"%PDF-1.4\n"}))
    whole = [Reading().settings(Path(name)) for name in ("a.zip", "a.eml", "a.md")]
    monkeypatch.setattr(readers, "library_of", lambda path: "no pypdfium2" if path.suffix == ".pdf" else "")
    later = [Reading().settings(Path(name)) for name in ("a.zip", "a.eml", "a.md")]
    assert [one == other for one, other in zip(whole, later, strict=True)] == [False, False, True]
    assert Reading().settings(Path("a.zip"), is_whole=True) == whole[0]  # what was read before stays valid


def test_a_changed_reader_reads_files_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Reading().settings(Path("a.csv")), Reading().means(Path("a.csv"))
    monkeypatch.setattr(readers, "REVISION", "another")
    assert Reading().settings(Path("a.csv")) != before[0]
    assert Reading().means(Path("a.csv")) != before[1]
