"""Documents of every format: their text, and the place of each part of it in the file; small files that readers once
got wrong."""

from __future__ import annotations

import re
import sys
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvtool.core.cache.entries import ChunkRef, DocumentEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.marks import Mark, place_of
from kvtool.core.corpus import reading as reading_module
from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import UnreadableFile
from kvtool.core.corpus.reading import Bounds, Reading
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.options.resolve import resolve
from kvtool.core.retrieval.finder import Places
from tests.serve.conftest import wait_until
from tests.support import documents
from tests.support.office.portable import pdf, scanned
from tests.wording import refused

_CASES = Path(__file__).parent / "cases"
_EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((_CASES / "expected.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def reading() -> Iterator[Reading]:
    with Reading(bounds=Bounds(seconds=600)) as made:
        yield made


@pytest.mark.parametrize("name", _EXPECTED)
def test_the_text_of_a_file_is_read_whole(name: str, reading: Reading) -> None:
    path = _CASES / name
    text = "\n".join(document.text for document in reading.documents(path, path.read_bytes()))
    missing = [pattern for pattern in _EXPECTED[name]["matches"] if not re.search(pattern, text)]
    assert (missing, [part for part in _EXPECTED[name].get("without", ()) if part in text]) == ([], []), text


def test_every_file_has_an_expectation() -> None:
    assert {path.name for path in _CASES.iterdir()} == {*_EXPECTED, "expected.toml"}


def test_a_process_reads_what_this_one_would(tmp_path: Path, reading: Reading) -> None:
    asked = documents.write(tmp_path)
    for path in (tmp_path / asked[number].file for number in (7, 10, 14)):
        assert reading.documents(path, path.read_bytes()) == read_documents(path, path.read_bytes())


def test_places_of_several_pages() -> None:
    text, marks = "one\n\ntwo\n\nthree\n", (Mark(0, "p. 1"), Mark(5, "p. 2"), Mark(10, "p. 3"))
    assert place_of(text, marks, 0, 4).label == "p. 1"
    assert place_of(text, marks, 4, 9).label == "p. 2"
    assert place_of(text, marks, 3, len(text)).label == "p. 2–3"
    assert place_of(text, (Mark(0, "Costs row 9"), Mark(5, "Notes row 1")), 0, 9).label == "Costs row 9 – Notes row 1"
    assert place_of(text, (Mark(0, 7), Mark(5, 12)), 3, 9).line == 12
    assert place_of(text, (), 4, 9).line == 3


def test_pages_of_a_pdf(reading: Reading) -> None:
    page = ["The mill stands by the river."]
    (document,) = reading.documents(Path("/a.pdf"), pdf([page, [], page]))
    assert document.notes == ()  # an empty page needs no note
    with refused(UnreadableFile):
        reading.documents(Path("/a.pdf"), scanned(3))
    pages = [
        ["The annual report", f"Question {n}", f"The mill ground {n} sacks.", "11/28/26, 12:19 AM", f"a.html {n}/4"]
        for n in range(1, 5)
    ]
    (document,) = reading.documents(Path("/a.pdf"), pdf([*pages, []]))
    assert document.text.count("The annual report") == 1
    assert document.text.count("11/28/26") == document.text.count("a.html") == 1
    assert all(f"Question {n}\nThe mill ground {n} sacks." in document.text for n in range(1, 5))
    (labels,) = reading.documents(Path("/b.pdf"), pdf([["Fragile"]] * 4))
    assert labels.text.count("Fragile") == 4


def _python(program: str) -> str:
    return f"{sys.executable} -c '{program}' {{}}"


def test_a_command_reads_a_format(tmp_path: Path) -> None:
    path = tmp_path / "a b.djvu"
    path.write_bytes(b"AT&TFORM")
    by = Reading({".djvu": _python(r'import sys; print("first\fsecond", sys.argv[1])')})
    assert by.takes(path)
    assert not by.refuses(path)
    assert by.settings(path) != Reading({".djvu": "cat {}"}).settings(path) != by.settings(Path("a.txt"))
    assert by.settings(Path("a.txt")) == Reading().settings(Path("a.txt"))
    (document,) = by.documents(path, b"")
    assert document.text.split() == ["first", "second", *str(path).split()]
    assert document.marks == (Mark(0, "p. 1"), Mark(7, "p. 2"))


def test_a_line_of_what_a_command_says_is_called_so(tmp_path: Path) -> None:
    """The file itself has no such line."""
    (document,) = Reading({".doc": _python(r'print("first\n\nthird")')}).documents(tmp_path / "a.doc", b"")
    assert document.text == "first\n\nthird\n"
    assert place_of(document.text, document.marks, 7, 12).cite("a.doc") == "a.doc text line 3"
    assert place_of(document.text, document.marks, 0, 13).cite("a.doc") == "a.doc text line 1–3"
    chunks = (ChunkRef(b"0" * 16, 0, 6, 2), ChunkRef(b"1" * 16, 6, 13, 2))
    places = Places(cast(Store, _Documents(DocumentEntry("/in/a.doc", "text", document.text, chunks, document.marks))))
    assert indices(places, "/in/a.doc:3") == indices(places, "/in/a.doc text line 3") == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "seconds"),
    [
        *(('import sys; sys.exit("no such page")', 300), ("import time; time.sleep(600)", 1)),
        *(("pass", 300), ("print(chr(0) * 9)", 300)),
    ],
)
def test_what_a_command_does_wrong_fails_its_file_alone(program: str, seconds: int, tmp_path: Path) -> None:
    with refused(UnreadableFile, numbers=True):
        Reading({".x": _python(program)}, Bounds(seconds)).documents(tmp_path / "a.x", b"")
    with refused(UnreadableFile, numbers=True):
        Reading({".x": "/no/such/program {}"}).documents(tmp_path / "a.x", b"")


def test_commands_come_from_ones_own_configuration_alone(tmp_path: Path) -> None:
    """The working folder's file may be anybody's, and would start programs."""
    own = tmp_path / "own.toml"
    own.write_text('[readers]\ndjvu = "djvutxt {}"\n', "utf-8")
    options = resolve([IngestOptions], config=own, environ={}, folder=tmp_path).get(IngestOptions)
    assert options.reading.commands == {".djvu": "djvutxt {}"}
    (tmp_path / "kvtool.toml").write_text('[readers]\ntxt = "rm {}"\n', "utf-8")
    with refused(UsageError):
        resolve([IngestOptions], environ={"KVTOOL_CONFIG": str(own)}, folder=tmp_path)


@pytest.mark.parametrize("written", ["djvutxt {}", "=cat {}", "a/b=cat {}", "x=cat", "x={}", "x=cat '{}"])
def test_what_is_no_command(written: str) -> None:
    with pytest.raises(UsageError):
        IngestOptions(readers=(written,))


_HEAD = "Subject: Der Ofen steht\nFrom: a@example.org\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("raw.eml", f"{_HEAD}\n인사말\n가마는 서쪽에 있다.\nBye\n".encode()),  # 8 bits, and no charset is named
        ("same.eml", f"{_HEAD}X-Note: a\n\n가마는 서쪽에 있다.\na\n".encode()),
        ("short.eml", "Subject: 가마는\n\n가마는\n".encode()),  # the headers contain the body's text, too
        ("crlf.eml", f"{_HEAD}\nfirst\n\n가마는 서쪽에 있다.\n".replace("\n", "\r\n").encode()),
        ("feeds.eml", f"{_HEAD}\nfirst\f\u2028\x85page\n가마는 서쪽에 있다.\n".encode()),
        ("box.mbox", f"From a\r\n{_HEAD}\nlone\rreturn\n가마는 서쪽에 있다.\n".encode()),
        ("lines.tex", "tabs \\=\na\n가마는 서쪽에 있다.\n".encode()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_is_cited_where_it_stands_in_its_file(name: str, data: bytes) -> None:
    (document,) = read_documents(Path("/in") / name, data)
    start = document.text.rindex("가마는")
    lines = data.decode().split("\n")
    last = max(number for number, line in enumerate(lines, 1) if "가마는" in line)
    assert place_of(document.text, document.marks, start, len(document.text)).line == last


def test_a_place_names_its_chunks(tmp_path: Path) -> None:
    sheets = (Mark(0, "Costs row 1"), Mark(10, "Costs row 2"), Mark(20, "Two words row 1"), Mark(30, "Two words row 2"))
    chunks = tuple(ChunkRef(bytes([number]) * 16, 10 * number, 10 * number + 10, 3) for number in range(4))
    source = str(tmp_path / "my costs.xlsx")
    document = DocumentEntry(source, "markdown", "123456789\n" * 4, chunks, sheets)
    places = Places(cast(Store, _Documents(document)))
    for number, mark in enumerate(sheets):
        assert indices(places, f"{source} {mark.place}") == [number]
    with pytest.raises(UsageError):
        places.of_chunks(f"{source} Other row 1")
    pages = tuple(Mark(20 * number, f"p. {number + 1}") for number in range(3))
    chunks = tuple(ChunkRef(bytes([number]) * 16, 8 * number, min(60, 8 * number + 8), 3) for number in range(8))
    source = str(tmp_path / "a.pdf")
    places = Places(cast(Store, _Documents(DocumentEntry(source, "text", "123456789 " * 6, chunks, pages))))
    assert indices(places, f"{source}:1") == indices(places, f"{source} p. 1") == [0, 1, 2]
    assert indices(places, f"{source} p. 3") == [5, 6, 7]
    assert indices(places, f"{source} p. 1–2") == [2]  # as an answer cites that one
    plain = Places(cast(Store, _Documents(DocumentEntry(source, "text", "12345\n\n" + "x" * 53, chunks))))
    assert indices(plain, f"{source}:3") == list(range(8))
    assert indices(plain, f"{source}:2") == [0]  # an empty line: what comes next


def indices(places: Places, place: str) -> list[int]:
    return [passage.index for passage in places.of_chunks(place)]


def test_a_name_is_found_however_its_letters_are_composed() -> None:
    """Macs decompose Korean names (NFD)."""
    source = "/in/" + unicodedata.normalize("NFD", "물레방아.md")
    document = DocumentEntry(source, "text", "가마", (ChunkRef(b"0" * 16, 0, 2, 2),))
    assert indices(Places(cast(Store, _Documents(document))), "물레방아.md:1") == [0]


class _Documents:
    """As much of a store as its places need."""

    def __init__(self, document: DocumentEntry) -> None:
        self.document = lambda source: document
        self.sources = lambda: [document.source]
        self.documents_revision = lambda: 1


def test_what_a_reader_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = "import subprocess\nprint(subprocess.Popen(['sleep', '600'], stdout=2).pid, flush=True)\ninput()"
    monkeypatch.setattr(reading_module, "_PROGRAM", begun)
    child = reading_module.Child(Bounds())
    assert child._process.stdout is not None
    started = int(child._process.stdout.readline())
    child.end()
    status = Path(f"/proc/{started}/stat")  # its parent is gone: somebody else has to take note of its end
    wait_until(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")
