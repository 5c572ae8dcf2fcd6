"""Bad input of `ingest` and `query`, and odd worlds around them: the right exit code, and an unharmed store."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.corpus import walk
from kvtool.core.corpus.walk import Skip
from kvtool.core.ingest import survey
from tests.chaos.test_space import fail
from tests.cli.working import (
    QUESTION,
    SHORT,
    chunks_of,
    command,
    damages,
    environment,
    files_below,
    kvtool,
    untouched,
    write_corpus,
)
from tests.families import edit_config, save_tiny

TEXT = "The mill stands on the river."


def alone(folder: Path, name: str) -> Path:
    """Return the path for one bad file, in a new folder with nothing else in it."""
    folder.mkdir()
    return folder / name


# ---- nothing that could be read ----------------------------------------------------------------------------------


def binary_file(path: Path) -> None:
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 20)


BAD: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "folder": Path.mkdir,
    "empty": Path.touch,
    "blank": lambda path: path.write_text(" \n\n\t"),
    "binary": binary_file,
    "loop": lambda path: path.symlink_to(path),
    "dangling": lambda path: path.symlink_to(path.with_name("gone.txt")),
    "fifo": os.mkfifo,
}


@pytest.mark.some(6)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("form", [(), ("--json",), ("--dry-run",)], ids=lambda form: "".join(form) or "human")
def test_ingest_of_one_unreadable_path(
    kind: str, form: tuple[str, ...], store: Path, tiny: Path, tmp_path: Path
) -> None:
    path = alone(tmp_path / "in", "bad.txt")
    BAD[kind](path)
    kvtool("ingest", path, "--store", tmp_path / "new", "--model", tiny, *form).failed(
        2, "bad.txt" if kind != "dangling" else ""
    )
    assert not (tmp_path / "new").exists()
    with untouched(store):
        kvtool("ingest", path, "--store", store, *form).failed(2)


def broken_lines(path: Path) -> None:
    path.with_suffix(".jsonl").write_text("no JSON\n")


@pytest.mark.parametrize("make", [binary_file, broken_lines])
def test_ingest_of_a_bad_file_among_good_ones(make: Any, fresh: Any, tmp_path: Path) -> None:
    make(alone(tmp_path / "in", "bad.txt"))
    (tmp_path / "in" / "good.txt").write_text(TEXT)
    done = fresh(tmp_path / "in").fine(3)
    assert done.json["documents"] == {"added": 1, "changed": 0, "unchanged": 0, "removed": 0, "failed": 1}
    (failure,) = done.json["failures"]
    assert Path(failure["path"]).stem == "bad"
    assert failure["error"]
    assert f"failed: {failure['path']}: {failure['error']}\n" in done.err
    again = fresh(tmp_path / "in").fine().json  # it fails as it did: that is no news
    assert again["known_failures"] == [failure]
    assert again["documents"]["unchanged"] == 1
    assert again["chunks"]["computed"] == 0


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("made", "kind"),
    [("empty", "empty"), ("blank", "empty"), ("loop", "link"), ("dangling", "link"), ("fifo", "special")],
)
def test_ingest_counts_skipped_files(made: str, kind: str, fresh: Any, tmp_path: Path) -> None:
    BAD[made](alone(tmp_path / "in", "bad.txt"))
    (tmp_path / "in" / "good.txt").write_text(TEXT)
    (tmp_path / "in" / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    done = fresh(tmp_path / "in", "-v").fine(0)
    assert done.json["documents"] == {"added": 1, "changed": 0, "unchanged": 0, "removed": 0, "failed": 0}
    none = {each.value: 0 for each in Skip}
    assert done.json["skipped"] == none | {kind: 1, "unsupported": 1}
    for name in ("bad.txt", "photo.jpg"):
        assert f"skipped {tmp_path / 'in' / name}: " in done.err


@pytest.mark.slow
@pytest.mark.parametrize("make", [Path.touch, binary_file])
def test_ingest_keeps_a_document_that_became_unreadable(make: Any, fresh: Any, tmp_path: Path) -> None:
    """A half-written save is no reason to remove the document."""
    folder = write_corpus(tmp_path / "in", documents=2)
    fresh(folder).fine()
    before = chunks_of(tmp_path / "fresh", "mill0.md")
    (folder / "mill0.md").unlink()
    make(folder / "mill0.md")
    done = fresh(folder, "--sync").fine(3)
    assert done.json["documents"]["failed"] == 1
    assert "stays in the store" in done.err
    assert chunks_of(tmp_path / "fresh", "mill0.md") == before


@pytest.mark.slow
def test_ingest_without_permission(fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: permissions mean nothing to root."""
    folder = write_corpus(tmp_path / "in", documents=2)
    (folder / "locked").mkdir()

    def refuse(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def refused(path: Any, *more: Any) -> Any:
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *more)

        return refused

    monkeypatch.setattr(survey, "read_regular", refuse(survey.read_regular, "mill0.md"))
    monkeypatch.setattr(walk.os, "scandir", refuse(os.scandir, "locked"))
    failures = {Path(row["path"]).name: row["error"].lower() for row in fresh(folder).fine(3).json["failures"]}
    assert failures == {"mill0.md": "permission denied", "locked": "permission denied"}
    fresh(folder / "mill0.md", store=tmp_path / "other").failed(2)


# ---- odd, but text -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ingest_of_invalid_utf8(fresh: Any, tmp_path: Path) -> None:
    """Replaced and said, never refused, never fatal."""
    (tmp_path / "odd.txt").write_bytes(b"The mill \xff\xfe\xfa stands on the river. " * 5)
    done = fresh(tmp_path / "odd.txt").fine()
    assert done.json["documents"]["added"] == 1
    assert any("odd.txt" in warning for warning in done.json["warnings"])
    kvtool("query", "Where does the mill stand?", "--store", tmp_path / "fresh", "--max-tokens", "2").fine()


def test_ingest_of_hostile_file_names(fresh: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    names = ["-q.txt", "a\nb.txt", "[x].txt", "esc\x1b[31m.txt", "관측소.txt", "sp ace.txt"]
    for name in names:
        (folder / name).write_text(f"{TEXT} {name!r}")
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text(TEXT)
    assert fresh(folder).fine().json["documents"]["added"] == 7
    listed = kvtool("store", "ls", "--store", tmp_path / "fresh").fine().out
    assert "\x1b" not in listed
    assert damages(tmp_path / "fresh") == []
    assert fresh(folder).fine().json["documents"]["unchanged"] == 7


# ---- models ------------------------------------------------------------------------------------------------------


def cut_weights(folder: Path) -> None:
    weights = save_tiny("llama", folder) / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


MODELS: dict[str, Callable[[Path], object]] = {
    "missing": lambda folder: None,
    "no weights": lambda folder: (save_tiny("llama", folder) / "model.safetensors").unlink(),
    "cut weights": cut_weights,
    "cut.gguf": lambda path: path.write_bytes(b"GGUF\x03\0\0\0" + (3).to_bytes(8, "little")),
    "hostile.gguf": lambda path: path.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64),
    "unknown positions": lambda folder: edit_config(
        save_tiny("llama", folder), rope_parameters={"rope_type": "mrope", "rope_theta": 10000.0}
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MODELS)
def test_ingest_and_query_with_an_unusable_model(name: str, store: Path, corpus: Path, tmp_path: Path) -> None:
    model = tmp_path / name
    MODELS[name](model)
    kvtool("ingest", corpus, "--store", tmp_path / "new", "--model", model, "--offline").failed(12)
    assert not (tmp_path / "new").exists()
    with untouched(store):
        kvtool("ingest", corpus, "--store", store, "--model", model, "--offline").failed(12)
        kvtool("query", "mill", "--store", store, "--model", model, "--offline").failed(12)


# ---- query ----


@pytest.mark.slow
def test_query_longer_than_the_context(store: Path) -> None:
    with untouched(store):
        long = kvtool("query", "mill " * 3000, "--store", store, "--json").failed(2)
        assert "the prompt has" in long.err
        kvtool("query", QUESTION, "--store", store, "--max-tokens", "2000").failed(2)
        megabyte = kvtool("query", "-", "--store", store, stdin=b"mill " * 200_000)
        megabyte.failed(2)
        kvtool("query", QUESTION, "--store", store, "--set", "search.min_score=0", "--max-tokens", "1850").failed(
            2, "--top-k"
        )


@pytest.mark.parametrize("question", ["", "   ", "\n\t"])
def test_query_of_an_empty_question(question: str, store: Path) -> None:
    kvtool("query", question, "--store", store).failed(2)


@pytest.mark.slow
def test_query_from_stdin(store: Path) -> None:
    asked = kvtool("query", QUESTION, "--store", store, *SHORT, "--json").fine().json
    piped = kvtool("query", "-", "--store", store, *SHORT, "--json", stdin=f"{QUESTION}\n".encode()).fine().json
    assert piped["question"] == QUESTION
    assert piped["answer"] == asked["answer"]


def run_in_bash(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    line = " ".join(f"'{word}'" for word in command(*words))
    return subprocess.run(["bash", "-c", script.format(line)], capture_output=True, text=True, env=environment())


def test_query_from_a_closed_stdin(store: Path) -> None:
    done = run_in_bash("{} <&-", "query", "-", "--store", store)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "bug" not in done.stderr


def test_query_of_lone_surrogates(store: Path) -> None:
    """An argument whose bytes are not UTF-8 arrives with lone surrogates."""
    done = kvtool("query", os.fsdecode(b"mill \xff\xfe"), "--store", store, *SHORT, "--json").fine()
    assert done.json["chunks"]


@pytest.mark.slow
def test_query_into_a_closed_pipe(store: Path) -> None:
    done = run_in_bash("set -o pipefail; {} | true", "query", QUESTION, "--store", store, "--max-tokens", 50)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert damages(store) == []


@pytest.mark.slow
def test_query_and_ingest_of_a_read_only_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: permissions mean nothing to root."""
    shutil.rmtree(store / "index")
    shutil.rmtree(store / "gate")
    real = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
        before = files_below(store)
        kvtool("query", QUESTION, "--store", store, *SHORT).fine()
        kvtool("ingest", "/etc/hostname", "--store", store).failed(1, "read-only")
        assert files_below(store) == before
    kvtool("query", QUESTION, "--store", store, *SHORT).fine()


@pytest.mark.slow
def test_query_without_space_for_notes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query on a full disk answers: index, gate's verdict and access notes are conveniences."""
    shutil.rmtree(store / "index")
    shutil.rmtree(store / "gate")
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    monkeypatch.setattr(os, "fsync", fail)
    kvtool("query", QUESTION, "--store", store, *SHORT).fine()


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"question": 3}', '{"id": 1}', '{"question": "a", "chunks": "x"}', '{"question": null}']
)
def test_query_of_a_bad_batch_line(line: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"question": "mill"}\n' + line + "\n")
    done = kvtool("query", "--batch", tmp_path / "b.jsonl", "--store", store)
    done.failed(2)
    assert done.out == ""
    assert "line 1" not in done.err  # the parser's own count
    (tmp_path / "b.jsonl").write_text("\n\n")
    kvtool("query", "--batch", tmp_path / "b.jsonl", "--store", store).failed(2)


def test_query_out_of_memory(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaForCausalLM.forward", refuse)
    with untouched(store):
        kvtool("query", QUESTION, "--store", store).failed(1)
