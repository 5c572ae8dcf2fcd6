"""Parts that are ingested separately and merged are the store that one run makes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.corpus.options import Shard, shard_error
from kvtool.core.errors import StoreFormatError, StoreNotFoundError, UsageError
from kvtool.core.remote.options import ImportOptions
from kvtool.core.remote.packs import export, import_sources
from kvtool.core.remote.values import Survey
from tests.cli.working import CHUNKS, PREFIX, break_record, chunks_of, damages, kvtool, state, write_corpus
from tests.compress.making import check_sound
from tests.wording import refused

PARTS = 3


@pytest.fixture(scope="module")
def parts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, `whole`, made by one run, and `part-1` and so on, each by a run of its own."""
    folder = tmp_path_factory.mktemp("parts")
    write_corpus(folder / "corpus", parts=PARTS)
    _ingest(folder, "whole", tiny)
    for number in range(1, PARTS + 1):
        _ingest(folder, f"part-{number}", tiny, "--shard", f"{number}/{PARTS}")
    return folder


def _ingest(folder: Path, name: str, model: Path, *more: str) -> None:
    args = ("--store", folder / name, "--model", model, *CHUNKS, *PREFIX, *more)
    kvtool("ingest", folder / "corpus", *args).fine()


def _all(folder: Path) -> list[Path]:
    return [folder / f"part-{number}" for number in range(1, PARTS + 1)]


def test_every_path_is_in_one_part(tmp_path: Path) -> None:
    paths = [f"/corpus/{number}/주요 문서 {number}.md" for number in range(500)]
    for count in (1, 2, 7):
        held = [[path for path in paths if Shard(index, count).holds(path)] for index in range(count)]
        assert sorted(path for part in held for path in part) == sorted(paths)
        assert min(map(len, held)) > 500 / count / 2


@pytest.mark.parametrize("value", ["0/3", "4/3", "1", "1/0", "a/b", "1/3/5", "-1/3", " 1/3", ""])
def test_what_is_no_part_is_said(value: str) -> None:
    assert "I/N" in shard_error(value)


def test_merged_parts_are_what_one_run_makes(parts: Path, tmp_path: Path) -> None:
    import_sources(tmp_path / "all", _all(parts), ImportOptions(mine=True))
    assert state(tmp_path / "all") == state(parts / "whole")
    assert damages(tmp_path / "all") == []
    import_sources(tmp_path / "other", _all(parts)[::-1], ImportOptions(mine=True))
    assert state(tmp_path / "other") == state(parts / "whole")
    again = import_sources(tmp_path / "all", _all(parts), ImportOptions(mine=True))
    assert [report.files.transferred + report.chunks.transferred + report.bytes for report in again] == [0] * PARTS
    done = kvtool("ingest", parts / "corpus", "--store", tmp_path / "all", "--sync", "--json").fine().json
    assert (done["chunks"]["computed"], done["documents"]["removed"]) == (0, 0)


@pytest.mark.slow
def test_parts_keep_the_profiles_that_they_were_compressed_with(parts: Path, tmp_path: Path) -> None:
    made: dict[str, str | None] = {}
    sources = [Path(shutil.copytree(part, tmp_path / part.name)) for part in _all(parts)[:2]]
    for source in sources:
        compress(source, CompressOptions(levels=("2",), fit=True, fit_prompts=2, questions=0, keep_raw=False, yes=True))
        with Store.open(source) as store:
            made |= {chunk.hex(): store.made_with(chunk, "2") for chunk in store.chunk_ids()}
    import_sources(tmp_path / "all", sources, ImportOptions(mine=True))
    with Store.open(tmp_path / "all") as store:
        assert {chunk.hex(): store.made_with(chunk, "2") for chunk in store.chunk_ids()} == made
        assert store.codec_state()["profile"] in made.values()
    assert len({*made.values()} - {None}) == 2
    check_sound(tmp_path / "all")


def test_a_pack_and_a_store_merge(parts: Path, tmp_path: Path) -> None:
    first, *others = _all(parts)
    export(first, tmp_path / "first.kvpack")
    import_sources(tmp_path / "all", [*others, tmp_path / "first.kvpack"], ImportOptions(mine=True))
    assert state(tmp_path / "all") == state(parts / "whole")


def test_a_shard_forgets_only_what_is_gone(parts: Path, tmp_path: Path, tiny: Path) -> None:
    shutil.copytree(parts / "corpus", tmp_path / "corpus")
    _ingest(tmp_path, "whole", tiny)
    (tmp_path / "corpus" / "mill3.md").unlink()
    removed = 0
    for number in range(1, PARTS + 1):
        args = ("--store", tmp_path / "whole", "--shard", f"{number}/{PARTS}", "--sync", "--json")
        removed += kvtool("ingest", tmp_path / "corpus", *args).fine().json["documents"]["removed"]
    assert removed == 1


def test_a_part_without_files_is_a_store(parts: Path, tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "corpus").mkdir()
    shutil.copy(parts / "corpus" / "mill0.md", tmp_path / "corpus")
    for number in range(1, PARTS + 1):
        _ingest(tmp_path, f"part-{number}", tiny, "--shard", f"{number}/{PARTS}")
    import_sources(tmp_path / "all", _all(tmp_path))
    assert [len(chunks_of(tmp_path / "all", "mill0.md"))] == [len(chunks_of(parts / "whole", "mill0.md"))]


def test_an_empty_folder_is_a_mistake_for_a_shard_too(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "corpus").mkdir()
    args = ("--store", tmp_path / "none", "--model", tiny, "--shard", "1/2")
    kvtool("ingest", tmp_path / "corpus", *args).failed(2)


def test_damage_stays_behind_and_is_named(parts: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(parts / "whole", tmp_path / "broken"))
    (chunk, *_) = chunks_of(broken, "mill2.md")
    break_record(broken, chunk, 1)
    (report,) = import_sources(tmp_path / "all", [broken])
    assert [row["subject"] for row in report.damaged] == [f"chunk {chunk} at level raw"]
    assert damages(tmp_path / "all") == []
    (report,) = import_sources(tmp_path / "all", [parts / "whole"])
    assert report.chunks.transferred == 1
    assert state(tmp_path / "all")[1] == state(parts / "whole")[1]


def test_import_sees_a_snapshot_of_its_source(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(shutil.copytree(parts / "whole", tmp_path / "source"))

    made = Survey.catalogue

    def surveyed(survey: Survey) -> Any:
        found = made(survey)
        kvtool("store", "rm", "*", "--yes", "--store", source).fine()
        return found

    monkeypatch.setattr(Survey, "catalogue", surveyed)
    (report,) = import_sources(tmp_path / "all", [source], ImportOptions(mine=True))
    assert report.damaged == []
    assert state(tmp_path / "all") == state(parts / "whole")


def test_what_cannot_be_merged_changes_nothing(parts: Path, tmp_path: Path, tiny: Path) -> None:
    path, first = tmp_path / "all", _all(parts)[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        import_sources(path, [first, tmp_path / "nowhere"])
    with pytest.raises(StoreNotFoundError) as found:
        import_sources(path, [first, tmp_path / "empty"])
    assert ".kvpack" in found.value.hint  # not how to make the store that it is merged into
    assert not path.exists()
    with pytest.raises(UsageError):
        import_sources(parts / "whole", [parts / "whole"])
    (tmp_path / "link").symlink_to(first)
    with pytest.raises(UsageError):
        import_sources(tmp_path / "link" / "inner", [first])
    with pytest.raises(UsageError):
        import_sources(parts, [tmp_path / "link"])
    assert not (first / "inner").exists()
    kvtool("ingest", parts / "corpus", "--store", tmp_path / "bos", "--model", tiny, *CHUNKS, "--lead-in", "bos").fine()
    with refused(StoreFormatError):
        import_sources(tmp_path / "bos", [first])
