"""File permissions: a store is as secret as the documents, under any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, kvtool, write_batch, write_corpus
from tests.retrieval.conftest import static_model

__all__ = ["static_model"]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(*folders: Path) -> dict[str, str]:
    """What below folders, or the folder itself, is not only its owner's."""
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(paths) > 10
    status = {str(path): path.lstat().st_mode for path in paths if not path.is_symlink()}
    return {path: stat.filemode(mode) for path, mode in status.items() if mode & 0o077}


@pytest.mark.slow
def test_all_that_a_used_store_keeps_is_its_owners(
    open_umask: None, tiny: Path, static_model: Path, home: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mcp")
    from kvtool.core.agent.options import AgentOptions, read_keys
    from kvtool.serve.options import ServeOptions
    from tests.serve.conftest import serving

    corpus = write_corpus(tmp_path / "corpus", 3)
    store, tier = tmp_path / "new" / "store", tmp_path / "tier"
    asked = {"id": "a", "question": QUESTION, "answers": ["baker C"]}
    questions, kept = write_batch(tmp_path / "questions.jsonl", asked), tmp_path / "kept.jsonl"
    at = ("--store", store)
    kvtool("ingest", corpus, *at, "--model", tiny, *CHUNKS, *PREFIX, "--embedder", static_model).fine()
    kvtool("query", QUESTION, *at, *SHORT, "--retriever", "hybrid", "--audit", "1").fine()
    kvtool("compress", *at, "--fit", "--level", "2", "--level", "auto", "--max-loss", "10").fine()
    kvtool("eval", questions, *at, *SHORT, "--runs", "reuse", "--resume", kept).fine()
    kvtool("chat", *at, *SHORT, stdin=f"{QUESTION}\nWho else?\n".encode()).fine()
    (corpus / "mill1.md").write_text("# The mill\n\nIt was taken down.")
    kvtool("ingest", corpus, *at, "--sync").fine()
    kvtool("store", "verify", *at).fine()
    kvtool("store", "compact", *at).fine()
    kvtool("store", "push", f"file://{tier}", *at).fine()
    kvtool("store", "export", tmp_path / "a.kvpack", *at).fine()
    kvtool("query", QUESTION, "--store", f"file://{tier}", "--model", tiny, *SHORT).fine()
    read_keys(AgentOptions().key_path)
    read_keys(ServeOptions().key_path)
    with serving(store, uploads=tmp_path / "uploads") as served, served.client as client:
        sent = {"documents": [{"name": "notes/a.md", "text": "The kite is in Oslo."}]}
        assert client.post("/v1/documents", json=sent).status_code == 200
        assert client.get("/health").status_code == 200
        asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
    assert open_to_others(store, home, tmp_path / "uploads", tier) == {}
    assert [path.name for path in (kept, tmp_path / "a.kvpack") if path.stat().st_mode & 0o077] == []
