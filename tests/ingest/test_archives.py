"""Archives in a folder that is ingested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.corpus.test_archives import packed


@pytest.mark.slow
def test_an_archive_is_read_and_one_without_documents_is_skipped(fresh: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    members = {"a/tide.md": "High tide is at nine.", "b.txt": "The mill.", "c.png": "x"}
    (folder / "all.zip").write_bytes(packed(members))
    (folder / "pictures.zip").write_bytes(packed({"c.png": "x"}))
    done = fresh(folder).fine()
    assert done.json["documents"]["added"] == 2
    assert done.json["unsupported"] == {"archive": 1}
    assert "all.zip: pictures: 1 not read" in done.err
    again = fresh(folder).fine()
    assert again.json["documents"]["unchanged"] == 2
    assert again.json["unsupported"] == {"archive": 1}
