"""An unchanged file costs a stat, and no change is missed for it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.corpus import readers
from kvtool.core.corpus.reading import Document, Reading
from kvtool.core.ingest import survey
from tests.cli.working import chunks_of, drop_records, kvtool
from tests.remote.serving import wreck


def before_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    real = survey.read_regular

    def read(path: str, most: int) -> bytes:
        act(Path(path))
        return real(path, most)

    monkeypatch.setattr(survey, "read_regular", read)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    before_reading(monkeypatch, lambda path: counted.update([path.name]))
    return counted


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_RACY_SECONDS", -1e9)


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_RACY_SECONDS", 1e9)


def counts(fresh: Any, folder: Path, reads: Counter[str], *more: str) -> tuple[int, int, int]:
    """Files read, documents unchanged and changed of one more ingest."""
    reads.clear()
    documents = fresh(folder, *more).fine().json["documents"]
    return sum(reads[f"{name}.txt"] for name in ("one", "two", "three")), documents["unchanged"], documents["changed"]


@pytest.mark.slow
def test_unchanged_and_changed_files(fresh: Any, folder: Path, reads: Counter[str]) -> None:
    assert counts(fresh, folder, reads)[0] == 3
    assert counts(fresh, folder, reads) == (0, 3, 0)
    os.utime(folder / "one.txt", ns=(1, 1))
    assert counts(fresh, folder, reads) == (1, 3, 0)  # touched: read once
    assert counts(fresh, folder, reads) == (0, 3, 0)
    counts(fresh, folder, reads)
    path = folder / "two.txt"
    status = path.stat()
    path.write_text(path.read_text().replace("river", "ridge"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert counts(fresh, folder, reads) == (1, 2, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("recent")
def test_recent_change(fresh: Any, folder: Path, reads: Counter[str]) -> None:
    counts(fresh, folder, reads)
    assert counts(fresh, folder, reads) == (3, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1, "marks": "%%"}'])
def test_lost_marks(content: bytes, fresh: Any, folder: Path, reads: Counter[str], tmp_path: Path) -> None:
    counts(fresh, folder, reads)
    (tmp_path / "fresh" / "seen" / "files.json").write_bytes(content)
    assert counts(fresh, folder, reads) == (3, 3, 0)
    assert counts(fresh, folder, reads) == (0, 3, 0)


@pytest.mark.slow
def test_another_command_reads_its_files_anew(fresh: Any, folder: Path, reads: Counter[str]) -> None:
    counts(fresh, folder, reads)
    command = ("--reader", "txt=tac {}", "--read-timeout", "10m")
    assert counts(fresh, folder, reads, *command) == (3, 0, 3)
    assert counts(fresh, folder, reads, *command) == (0, 3, 0)


def test_growing_file(fresh: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an answer would call it changed although it is what was ingested."""

    def grow(path: Path) -> None:
        if path.name == "one.txt" and path.stat().st_size < 100:
            path.write_text(path.read_text() + " It was built by the baker, and by nobody else in the whole valley.")

    before_reading(monkeypatch, grow)
    fresh(folder).fine()
    with Store.open(tmp_path / "fresh") as store:
        entry = store.file(str(folder / "one.txt"))
    assert entry.size == (folder / "one.txt").stat().st_size


class TestFailures:
    @pytest.fixture
    def parsed(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        given: list[str] = []
        real = Reading.documents

        def counting(reading: Reading, path: Path, data: bytes) -> list[Document]:
            given.append(path.name)
            return real(reading, path, data)

        monkeypatch.setattr(Reading, "documents", counting)
        return given

    @pytest.fixture
    def broken(self, folder: Path) -> Path:
        path = folder / "broken.docx"
        path.write_bytes(b"PK no container")
        return path

    def test_told_and_parsed_once(
        self, fresh: Any, folder: Path, broken: Path, parsed: list[str], reads: Counter[str]
    ) -> None:
        first = fresh(folder).fine(3).json
        assert (first["known_failures"], parsed.count("broken.docx")) == ([], 1)
        reads.clear()
        again = fresh(folder).fine().json
        assert again["known_failures"] == first["failures"]
        assert (again["failures"], again["documents"]["failed"]) == ([], 0)
        fresh(folder, "--fail-fast").fine()
        assert (parsed.count("broken.docx"), reads["broken.docx"]) == (1, 0)
        os.utime(broken, ns=(1, 1))
        fresh(folder).fine(3)
        assert parsed.count("broken.docx") == 2

    @pytest.mark.usefixtures("broken")
    def test_one_line_says_that_they_are_as_before(self, fresh: Any, folder: Path, tmp_path: Path) -> None:
        fresh(folder).fine(3)
        again = ("ingest", folder, "--store", tmp_path / "fresh")
        (line,) = [line for line in kvtool(*again).fine().out.splitlines() if "as before" in line]
        assert line.startswith(f"1 document is still unreadable, as before ({folder / 'broken.docx'}: ")
        quiet = kvtool(*again, "--quiet").fine()
        assert (quiet.out, quiet.err) == ("", "")
        assert "broken.docx" in kvtool(*again, "-v").fine().err
        (folder / "other.docx").write_bytes(b"PK none either")
        new = kvtool(*again, "--quiet").fine(3).err
        assert "other.docx" in new
        assert "broken.docx" not in new
        assert "2 documents are still unreadable" in kvtool(*again).fine().out

    @pytest.mark.usefixtures("recent", "broken")
    def test_recent_file_is_tried_again(self, fresh: Any, folder: Path, parsed: list[str]) -> None:
        fresh(folder).fine(3)
        fresh(folder).fine()
        assert parsed.count("broken.docx") == 2

    def test_read_errors_are_tried_again(self, fresh: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        errors = ["no permission", "no permission", "no such disk"]

        def fail(path: Path) -> None:
            if path.name == "two.txt" and errors:
                raise OSError(5, errors.pop(0))

        before_reading(monkeypatch, fail)
        assert [fresh(folder).code for _ in range(4)] == [3, 0, 3, 0]
        assert errors == []

    def test_what_is_read_or_gone_is_remembered_no_longer(self, fresh: Any, folder: Path, broken: Path) -> None:
        other = folder / "other.docx"
        other.write_bytes(b"PK none either")

        def remembered() -> set[str]:
            kept = json.loads((folder.parent / "fresh" / "seen" / "files.json").read_text("utf-8"))
            return {Path(row["path"]).name for row in kept["failures"].values()}

        fresh(folder).fine(3)
        assert remembered() == {"broken.docx", "other.docx"}
        other.unlink()
        fresh(folder).fine()
        assert remembered() == {"broken.docx"}
        broken.unlink()
        broken.with_suffix(".txt").write_text("The fourth mill stands on the hill.")
        fresh(folder).fine()
        assert remembered() == set()
        broken.write_bytes(b"PK no container")
        fresh(folder).fine(3)
        fresh(folder, "--reader", "docx=cat {}").fine()
        assert remembered() == set()

    def test_nothing_else_is_there(self, fresh: Any, folder: Path, broken: Path, parsed: list[str]) -> None:
        fresh(folder / "one.txt").fine()
        for _ in range(2):
            fresh(broken).failed(2, "damaged")
        assert parsed.count("broken.docx") == 1

    @pytest.mark.usefixtures("broken")
    def test_another_reader(self, fresh: Any, folder: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        fresh(folder).fine(3)
        fresh(folder, "--read-timeout", "2m").fine(3)
        monkeypatch.setattr(readers, "version", lambda library: "0.0.1")  # another one was installed
        fresh(folder).fine(3)
        fresh(folder).fine()
        assert parsed.count("broken.docx") == 3
        fresh(folder, "--reader", "docx=cat {}").fine()
        assert parsed.count("broken.docx") == 4

    def test_mended_script_tries_them(self, fresh: Any, folder: Path, tmp_path: Path, parsed: list[str]) -> None:
        (folder / "notes.odd").write_text("The fourth mill stands on the hill.")
        script = tmp_path / "read.sh"
        script.write_text("exit 3\n")
        command = ("--reader", f"odd=sh {script} {{}}")
        for code in (3, 0):
            fresh(folder, *command).fine(code)
        script.write_text('cat "$1"\n')
        assert fresh(folder, *command).fine().json["documents"]["added"] == 1
        assert parsed.count("notes.odd") == 3


@pytest.mark.slow
def test_aborted_run(fresh: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(folder).fine()
    drop_records(tmp_path / "fresh", *chunks_of(tmp_path / "fresh", "two.txt"))
    with monkeypatch.context() as broken:
        broken.setattr("kvtool.core.ingest.job._Job._storer", lambda *_: 1 / 0)
        assert fresh(folder).code != 0
    assert fresh(folder).fine().json["chunks"]["computed"] == 1


@pytest.mark.slow
def test_a_file_that_came_back_without_its_kv_is_computed_again(fresh: Any, folder: Path, tmp_path: Path) -> None:
    fresh(folder).fine()
    fresh(folder).fine()
    (chunk,) = chunks_of(tmp_path / "fresh", "two.txt")
    url = f"file://{tmp_path}/tier"
    kvtool("store", "push", url, "--store", tmp_path / "fresh").fine()
    kvtool("store", "rm", folder / "two.txt", "--store", tmp_path / "fresh").fine()
    wreck(url, chunk, "raw", 0)
    assert kvtool("store", "pull", url, "--store", tmp_path / "fresh").code == 13
    assert fresh(folder).fine().json["chunks"]["computed"] == 1
