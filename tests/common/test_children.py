"""A child of kvtool runs kvtool's code, and nothing from the folder that it was started in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvtool
from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from kvtool.core.common.children import python, search_path

POISON = "import pathlib; pathlib.Path(__file__).with_name('ran').touch(); raise SystemExit('poisoned')"


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name in ("json", "numpy", "xxhash", "time", "fractions", "lmdb", "sitecustomize"):
        (folder / f"{name}.py").write_text(POISON)
    monkeypatch.chdir(folder)
    return folder


def test_verify_runs_no_module_of_the_working_directory(
    poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("")  # as in `python -c` and a notebook
    with Store.create_or_open(tmp_path / "store") as store:
        assert verify(store, None) == []
    assert not (poisoned / "ran").exists()


def test_a_child_finds_the_kvtool_of_its_parent(tmp_path: Path) -> None:
    """In the working directory, or where `PYTHONPATH` says: another one that is installed is not taken instead."""
    shutil.copytree(Path(kvtool.__file__).parent, tmp_path / "kvtool", ignore=shutil.ignore_patterns("__pycache__"))
    program = "import subprocess, kvtool; from kvtool.core.common.children import python\n"
    program += "subprocess.run(python('import kvtool; print(kvtool.__file__)'), check=True)"
    for cwd, path in ((tmp_path, None), (Path("/"), str(tmp_path))):
        environment = {**os.environ} | ({"PYTHONPATH": path} if path else {})
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=cwd, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(tmp_path / "kvtool" / "__init__.py")


def test_a_working_directory_that_is_gone_starts_children_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    subprocess.run(python("import kvtool"), check=True)
    assert all(map(os.path.isabs, search_path()))


@pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel sees to it")
def test_what_was_started_ends_with_a_process_that_is_killed() -> None:
    program = (
        "import subprocess, sys, time\nfrom kvtool.core.common.children import started\n"
        "nowhere = subprocess.DEVNULL\n"
        "child = started(['sleep', '600'], stdin=nowhere, stdout=nowhere, stderr=nowhere)\n"
        "print(child.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(python(program), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    status = Path(f"/proc/{child}/stat")
    for _ in range(3000):  # its parent is gone: somebody else has to take note of its end
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    os.kill(child, 9)
    pytest.fail("it runs on")
