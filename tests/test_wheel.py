"""The installed files: the package, and none of the tests and samples."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 4 * 2**20
_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "kvtool", tree / "kvtool", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "samples", "samples/benchmarks", "samples/tools"):  # they are there to be left out
        (tree / name).mkdir()
        (tree / name / "__init__.py").touch()
    done = subprocess.run([sys.executable, "-c", _BUILD, out], cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl")
    return made


def test_a_wheel_holds_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    about = {name for name in names if not name.startswith("kvtool/")}
    assert {name.split("/", 1)[0] for name in about} == {"kvtool-0.1.0.dist-info"}
    kept = (path for path in (ROOT / "kvtool").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    wanted = {path.relative_to(ROOT).as_posix() for path in kept}
    assert wanted - names == set()
    assert names - about - wanted == set()
    assert wheel.stat().st_size < MOST_BYTES


def test_the_container_is_run_by_nobody_special() -> None:
    lines = (ROOT / "samples" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert "USER 1000:1000" in lines
    assert "VOLUME /data" in lines
    ignored = (ROOT / "samples" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = [word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]]
    assert ignored[0] == "*"
    assert set(copied) == {word[1:] for word in ignored if word.startswith("!")}
