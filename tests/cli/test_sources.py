from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.cli.answers import cited
from kvtool.core.query.reply import ReplyChunk
from tests.cli.working import PREFIX, SHORT, kvtool


@pytest.mark.parametrize(
    ("source", "origin", "shown"),
    [
        ("/in/report (1).md", "", "/in/report (1).md:3"),
        ("/in/a\nerror: no.md", "", "/in/a\\nerror: no.md:3"),
        ("/in/own.md:1, b.md", "a.kvpack", '"/in/own.md:1, b.md:3" (from a.kvpack)'),
        ("/in/a.md (from team.kvpack)", "", '"/in/a.md (from team.kvpack):3"'),
        ("/in/a.md", "a.kvpack), own.md:1 (from b", '/in/a.md:3 (from "a.kvpack), own.md:1 (from b")'),
        ("/in/a.md", "a\nerror: no.kvpack", "/in/a.md:3 (from a\\nerror: no.kvpack)"),
        ("/in/own.md:1,\u200b b.md", "", '"/in/own.md:1,\u200b b.md:3"'),
    ],
)
def test_a_citation_is_one_place_whatever_the_file_and_its_origin_are_called(
    source: str, origin: str, shown: str
) -> None:
    chunk = ReplyChunk(id="ab", source=source, start=0, end=1, line=3, label="", score=1.0, tokens=1,
                       status="hit", origin=origin, text="x")  # fmt: skip
    assert cited(chunk) == shown


def test_no_command_gives_a_line_of_a_name_a_line_of_its_own(tmp_path: Path, tiny: Path) -> None:
    folder, store, pack = tmp_path / "docs", tmp_path / "store", tmp_path / "a\nerror: of a pack"
    folder.mkdir()
    (folder / "a\nerror: of a file.md").write_text("The mill was built by baker Z.")
    kvtool("ingest", folder, "--store", tmp_path / "theirs", "--model", tiny, *PREFIX).fine()
    for args in (
        ("store", "export", pack, "--store", tmp_path / "theirs"),
        ("store", "import", pack),
        ("query", "Who built the mill?", "-v", "--explain", *SHORT),
        ("store", "pin", folder),
        ("store", "pin", "--remove", folder),
        ("store", "rm", folder, "--yes"),
    ):
        done = kvtool(*args, *(() if "--store" in args else ("--store", store)))
        assert done.code == 0
        assert not [line for line in (done.out + done.err).splitlines() if line.startswith("error: ")], done
