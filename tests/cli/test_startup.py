"""What a question from a shell reads, and where its time goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.core.checkpoint import files
from kvtool.core.checkpoint.gguf.folder import prepare_folder
from kvtool.core.checkpoint.gguf.header import read_header
from tests.checkpoint.gguf_files import write_gguf
from tests.cli.working import QUESTION

SCRIPT = Path(__file__).parents[2] / "samples" / "benchmarks" / "startup.py"
READ = {  # files made of a GGUF file that Python opens to load its model, and how often
    "config.json": 4,
    "tokenizer.json": 0,
    "tokenizer_config.json": 1,
    "gguf-source.json": 2,
}


@pytest.mark.slow
def test_a_tensor_of_a_gguf_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a library reads in Rust are not counted."""
    monkeypatch.setattr(files, "_RACY_SECONDS", -1.0)  # as if it had been used some time ago
    gguf = write_gguf(tmp_path / "tiny.gguf", kinds={"": "Q8_0"})
    folder = prepare_folder(gguf)
    lines = (
        "import json, sys",
        "from collections import Counter",
        "opened = Counter()",
        "sys.addaudithook(lambda event, what: opened.update([str(what[0])]) if event == 'open' else None)",
        "from kvtool.core.checkpoint.hub import resolve",
        "from kvtool.core.checkpoint.load import load_model",
        f"load_model(resolve({str(gguf)!r}), device='cpu', packed=True)",
        "print(json.dumps(opened))",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    opened = json.loads(done.stdout)
    assert {path.name: opened.get(str(path), 0) for path in folder.iterdir()} == READ
    assert opened[str(gguf)] == 1 + len(read_header(gguf).tensors)


@pytest.mark.slow
def test_a_question_imports_no_transformers(store: Path) -> None:
    lines = (
        "import sys",
        "import kvtool",
        f"kvtool.open({str(store)!r}).query({QUESTION!r}, max_tokens=2)",
        "assert 'torch' in sys.modules",
        "print(*{name.partition('.')[0] for name in sys.modules} & {'transformers', 'scipy'})",
    )
    for _ in range(2):  # the first one may check the model, by what transformers computes
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            (),
            "clock, s;processor, s;before it, ms;import, ms;load model, ms;retrieve, ms;lay out, ms;fuse, ms;"
            "generate, ms;modules",
        ),
        (("--server",), "clock, s;first token, s;the rest, s"),
    ],
)
def test_the_sample_says_where_a_question_spends_its_time(more: tuple[str, ...], expected: str, store: Path) -> None:
    words = [sys.executable, str(SCRIPT), QUESTION, "--store", str(store), "--runs", "1", "--max-tokens", "2", *more]
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line.strip().split("  ")[0] for line in done.stdout.splitlines()[1:]]
    assert [line for line in lines if line != "read, MB"] == expected.split(";")
    assert not Path(f"{store}.sock").exists()
