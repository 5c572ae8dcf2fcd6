"""Archives in a folder that is ingested."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest


def pack(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)


@pytest.mark.slow
def test_an_archive_is_read_and_one_without_documents_is_skipped(fresh: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pack(folder / "all.zip", {"a/tide.md": b"High tide is at nine.", "b.txt": b"The mill.", "c.png": b"x"})
    pack(folder / "pictures.zip", {"c.png": b"x"})
    done = fresh(folder).fine()
    assert done.json["documents"]["added"] == 2
    assert done.json["unsupported"] == {"archive": 1}
    assert "all.zip: pictures: 1 not read" in done.err
    again = fresh(folder).fine()
    assert again.json["documents"]["unchanged"] == 2
    assert again.json["unsupported"] == {"archive": 1}
