"""Documents that are broken, locked, or made to hurt: only these are refused, by name, in bounded time and memory."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.corpus import reading as reading_module
from kvtool.core.corpus.readers.document import UnreadableFile
from kvtool.core.corpus.reading import Bounds, Reading
from kvtool.core.ingest import stream
from tests.cli.working import listing
from tests.corpus.test_slides import edited
from tests.ingest.test_seen import before_reading
from tests.support.office.facts import facts
from tests.support.office.portable import pdf
from tests.support.office.writers import WRITERS

_LAUGHS = (
    '<!DOCTYPE x [<!ENTITY a0 "ha">' + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 20)) + "]>"
)
_PACKED = ("docx", "pptx", "xlsx", "odt", "epub")
_URN = "urn:oasis:names:tc:opendocument:xmlns"
_ODT = (
    f'<office:document-content xmlns:office="{_URN}:office:1.0" xmlns:text="{_URN}:text:1.0">'
    "<office:body><text:p>&a19;</text:p></office:body></office:document-content>"
)

_SERVE = "reading.serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"


@pytest.fixture(scope="module")
def reading() -> Iterator[Reading]:
    with Reading(bounds=Bounds(seconds=600)) as made:
        yield made


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, fact = tmp_path_factory.mktemp("sound"), next(facts("en"))
    for ending, write in WRITERS.items():
        write(folder / f"a.{ending}", fact)
    return {ending: (folder / f"a.{ending}").read_bytes() for ending in WRITERS}


def refused(reading: Reading, name: str, data: bytes) -> str:
    with pytest.raises(UnreadableFile) as raised:
        reading.documents(Path("/in") / name, data)
    return raised.value.message


def claiming(data: bytes, size: int) -> bytes:
    at = data.index(b"PK\1\2") + 24
    return data[:at] + struct.pack("<I", size) + data[at + 4 :]


def locked(data: bytes) -> bytes:
    word = "<" + "5a" * 32 + ">"
    lock = f"/Root 1 0 R /Encrypt << /Filter /Standard /V 1 /R 2 /O {word} /U {word} /P -4 >> /ID [{word} {word}]"
    return data.replace(b"/Root 1 0 R", lock.encode())


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pdf", *_PACKED, "eml", "ipynb"])
def test_broken_files(ending: str, reading: Reading, sound: dict[str, bytes]) -> None:
    data = sound[ending]
    assert refused(reading, f"a.{ending}", random.Random(7).randbytes(5000))
    assert refused(reading, f"a.{ending}", b"")
    if ending != "eml":  # of a mail any beginning is one
        assert refused(reading, f"a.{ending}", data[: len(data) // 2])


@pytest.mark.parametrize("ending", _PACKED)
def test_zip_bombs(ending: str, reading: Reading, sound: dict[str, bytes]) -> None:
    assert "unpacks to" in refused(reading, f"a.{ending}", claiming(sound[ending], 0xF0000000))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("ending", "name", "body"),
    [
        ("odt", "content.xml", _ODT),
        ("epub", "OEBPS/book.opf", "<package>&a19;</package>"),
        ("docx", "word/document.xml", "<x>&a19;</x>"),
        ("pptx", "ppt/presentation.xml", "<x>&a19;</x>"),
        ("xlsx", "xl/workbook.xml", "<x>&a19;</x>"),
    ],
)
def test_entities_that_expand(ending: str, name: str, body: str, reading: Reading, sound: dict[str, bytes]) -> None:
    assert refused(reading, f"a.{ending}", edited(sound[ending], name, lambda text: _LAUGHS + body))


@pytest.mark.parametrize("ending", ["docx", "pptx", "xlsx"])
def test_passwords(ending: str, reading: Reading, sound: dict[str, bytes]) -> None:
    office = b"\xd0\xcf\x11\xe0" + bytes(500) + "EncryptedPackage".encode("utf-16-le") + bytes(500)
    assert "password" in refused(reading, f"a.{ending}", office)
    assert "password" in refused(reading, "a.pdf", locked(sound["pdf"]))


@pytest.mark.slow
def test_ten_thousand_pages(reading: Reading) -> None:
    (document,) = reading.documents(Path("/in/a.pdf"), pdf([[f"This is page {n}."] for n in range(1, 10_001)]))
    assert [mark.place for mark in document.marks[-2:]] == ["p. 9999", "p. 10000"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("time.sleep(600)", "takes over 1 s to read"),
        ("bytearray(10**11)", "takes over 0.5 GB of memory to read"),
        ("os.kill(os.getpid(), 11)", "has crashed"),
    ],
)
def test_bounds(deed: str, why: str, monkeypatch: pytest.MonkeyPatch, sound: dict[str, bytes]) -> None:
    program = (
        f"import os, time\nfrom kvtool.core.corpus import reading\nreading.read_documents = lambda *given: {deed}\n"
    )
    with Reading(bounds=Bounds(seconds=1, memory=5 * 10**8)) as reading:
        with monkeypatch.context() as patch:
            patch.setattr(reading_module, "_PROGRAM", f"{program}{_SERVE}")
            assert why in refused(reading, "a.odt", sound["odt"])
        reading.bounds = Bounds(seconds=600)
        assert reading.documents(Path("/in/a.odt"), sound["odt"])  # by another process


def test_forked_reader(monkeypatch: pytest.MonkeyPatch, sound: dict[str, bytes], tmp_path: Path) -> None:
    """A copy of the process that holds its pipes, in a session of its own where no signal to the group finds it."""
    seen, given_up = tmp_path / "seen", tmp_path / "given up"
    program = (
        "import os, time\nfrom kvtool.core.corpus import reading\n"
        "def read(*file):\n"
        "    if os.fork():\n"
        "        os.kill(os.getpid(), 9)\n"
        "    os.setsid()\n"
        "    for _ in range(3000):\n"
        f"        if os.path.exists({str(seen)!r}): os._exit(0)\n"
        "        time.sleep(0.1)\n"
        f"    open({str(given_up)!r}, 'w').close()\n"
        "    os._exit(0)\n"
        "reading.read_documents = read\n"
    )
    monkeypatch.setattr(reading_module, "_PROGRAM", f"{program}{_SERVE}")
    with Reading(bounds=Bounds(seconds=600)) as reading:
        assert "has crashed" in refused(reading, "a.odt", sound["odt"])
    assert not given_up.exists()
    seen.touch()


@pytest.mark.parametrize("deed", ["os.kill(os.getpid(), 11)", "raise_memory()"])
def test_reader_retries(deed: str, monkeypatch: pytest.MonkeyPatch, sound: dict[str, bytes]) -> None:
    program = (
        "import os\nfrom kvtool.core.corpus import reading\nreal, given = reading.read_documents, []\n"
        "def raise_memory(): raise MemoryError\n"
        f"reading.read_documents = lambda *file: {deed} if given else (given.append(1), real(*file))[1]\n"
    )
    monkeypatch.setattr(reading_module, "_PROGRAM", f"{program}{_SERVE}")
    with Reading(bounds=Bounds(seconds=600)) as reading:
        for _ in range(2):
            assert reading.documents(Path("/in/a.odt"), sound["odt"])


@pytest.mark.slow
def test_each_is_named_and_the_others_go_on(fresh: Any, tmp_path: Path, sound: dict[str, bytes]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.odt").write_bytes(sound["odt"])
    (folder / "bomb.docx").write_bytes(claiming(sound["docx"], 0xF0000000))
    (folder / "locked.pdf").write_bytes(locked(sound["pdf"]))
    (folder / "half.pptx").write_bytes(sound["pptx"][:1000])
    (folder / "all.7z").write_bytes(sound["docx"])
    (folder / "nothing.pdf").touch()
    done = fresh(folder, "-v", "--read-timeout", "10m").fine(3)
    assert done.json["documents"]["added"] == 1
    told = {Path(failure["path"]).name: failure["error"] for failure in done.json["failures"]}
    assert set(told) == {"bomb.docx", "locked.pdf", "half.pptx"}
    assert all(name in done.err for name in told)
    assert (done.json["skipped"]["unsupported"], done.json["skipped"]["empty"]) == (1, 1)
    assert "archives are not read" in done.err


@pytest.mark.slow
def test_missing_package(fresh: Any, tmp_path: Path, sound: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.pdf", "b.pdf", "d.docx"):
        (folder / name).write_bytes(sound[name[2:]])
    missing = "sys.modules.update(pypdfium2=None)\n"
    monkeypatch.setattr(reading_module, "_PROGRAM", missing + reading_module._PROGRAM)
    done = fresh(folder, "--read-timeout", "10m").fine(0)
    assert done.json["documents"] == {"added": 1, "changed": 0, "unchanged": 0, "removed": 0, "failed": 0}
    assert done.json["skipped"]["uninstalled"] == 2
    assert done.err.count("pip install 'kvtool[documents]'") == 1


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "error", [RecursionError("too deep"), MemoryError(), UnicodeEncodeError("gbk", "x", 0, 1, "no"), KeyError("x")]
)
@pytest.mark.parametrize(("room", "step"), [(reading_module, "read_documents"), (stream, "prepare")])
def test_exceptions(
    error: Exception, room: Any, step: str, folder: Path, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(room, step)

    def failing(subject: Any, *rest: Any) -> Any:
        path = subject if isinstance(subject, Path) else subject.found.path
        if path.name == "two.txt":
            raise error
        return real(subject, *rest)

    monkeypatch.setattr(room, step, failing)
    done = fresh(folder).fine(3)
    assert done.json["documents"]["added"] == 2
    assert [Path(failure["path"]).name for failure in done.json["failures"]] == ["two.txt"]
    assert "two.txt" in done.err
    assert len(listing(tmp_path / "fresh")) == 2
    fresh(folder, "--fail-fast", store=tmp_path / "fast").failed(1, "two.txt")


def test_a_file_too_large_to_read(folder: Path, fresh: Any) -> None:
    with (folder / "two.txt").open("wb") as file:
        file.truncate(1 << 40)  # no byte of it is on the disk
    done = fresh(folder).fine(3).json
    assert done["documents"]["added"] == 2
    assert "larger than 2 GiB" in done["failures"][0]["error"]


@pytest.mark.slow
def test_a_file_that_goes_while_it_is_looked_for(folder: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(path: Path) -> None:
        if path.name == "two.txt":
            raise FileNotFoundError(2, "No such file or directory", str(path))

    before_reading(monkeypatch, vanish)
    done = fresh(folder).fine().json
    assert done["documents"]["added"] == 2
    assert done["skipped"]["gone"] == 1
