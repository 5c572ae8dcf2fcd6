"""Bad input of `query`, and odd worlds around it: a clear message, the right code, an unharmed store."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.working import (
    QUESTION,
    SHORT,
    command,
    damages,
    environment,
    files_below,
    kvtool,
    untouched,
)


@pytest.mark.slow
def test_a_prompt_longer_than_the_context(store: Path) -> None:
    with untouched(store):
        long = kvtool("query", "mill " * 3000, "--store", store, "--json").failed(2, "the model takes 2048")
        assert "the prompt has" in long.err
        kvtool("query", QUESTION, "--store", store, "--max-tokens", "2000").failed(2, "the model takes 2048")
        megabyte = kvtool("query", "-", "--store", store, stdin=b"mill " * 200_000)
        megabyte.failed(2, "what the model takes has at most")
        kvtool("query", QUESTION, "--store", store, "--set", "search.min_score=0", "--max-tokens", "1850").failed(
            2, "--top-k"
        )


@pytest.mark.parametrize("question", ["", "   ", "\n\t"])
def test_an_empty_question(question: str, store: Path) -> None:
    kvtool("query", question, "--store", store).failed(2, "the question is empty")
    kvtool("query", "-", "--store", store, stdin=question.encode()).failed(2, "the question is empty")


@pytest.mark.slow
def test_a_question_from_stdin(store: Path) -> None:
    asked = kvtool("query", QUESTION, "--store", store, *SHORT, "--json").fine().json
    piped = kvtool("query", "-", "--store", store, *SHORT, "--json", stdin=f"{QUESTION}\n".encode()).fine().json
    assert piped["question"] == QUESTION
    assert piped["answer"] == asked["answer"]
    both = kvtool("query", "--store", store, *SHORT, stdin=f"{QUESTION}\nAnd when?\n".encode()).fine()
    assert "2 lines are one question" in both.err


def test_stdin_that_is_not_utf8(store: Path) -> None:
    kvtool("query", "-", "--store", store, stdin="방앗간".encode("cp949")).failed(2, "not UTF-8")


def test_no_stdin_at_all(store: Path) -> None:
    line = " ".join(f"'{word}'" for word in command("query", "-", "--store", store))
    done = subprocess.run(["bash", "-c", f"{line} <&-"], capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "bug" not in done.stderr


def test_a_question_that_is_not_text(store: Path) -> None:
    """An argument whose bytes are not UTF-8 arrives with lone surrogates."""
    done = kvtool("query", os.fsdecode(b"mill \xff\xfe"), "--store", store, *SHORT, "--json").fine()
    assert done.json["chunks"]


@pytest.mark.slow
def test_a_pipe_that_closes(store: Path) -> None:
    line = " ".join(f"'{word}'" for word in command("query", QUESTION, "--store", store, "--max-tokens", 50))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} | true"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert damages(store) == []


@pytest.mark.slow
def test_a_read_only_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_no_space_for_notes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query on a full disk answers: index, gate's verdict and access notes are conveniences."""
    shutil.rmtree(store / "index")
    shutil.rmtree(store / "gate")
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    monkeypatch.setattr("kvtool.core.cache.layout._write_new", _full)
    kvtool("query", QUESTION, "--store", store, *SHORT).fine()


def _full(*args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"question": 3}', '{"id": 1}', '{"question": "a", "chunks": "x"}', '{"question": null}']
)
def test_a_bad_batch_line(line: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"question": "mill"}\n' + line + "\n")
    done = kvtool("query", "--batch", tmp_path / "b.jsonl", "--store", store)
    done.failed(2, "line 2")
    assert done.out == ""
    assert "line 1" not in done.err  # the parser's own count
    (tmp_path / "b.jsonl").write_text("\n\n")
    kvtool("query", "--batch", tmp_path / "b.jsonl", "--store", store).failed(2, "no question")


def test_out_of_memory(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaForCausalLM.forward", refuse)
    with untouched(store):
        kvtool("query", QUESTION, "--store", store).failed(1, "out of memory")
