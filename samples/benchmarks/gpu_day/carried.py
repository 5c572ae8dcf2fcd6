"""Python packages that travel as wheels, to a machine that reaches no registry."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Distribution → module. The first are what such a machine has of itself; the rest can be carried.
THERE = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
}
CARRIED = {
    "annotated-doc": "annotated_doc",
    "annotated-types": "annotated_types",
    "anyio": "anyio",
    "charset-normalizer": "charset_normalizer",
    "click": "click",
    "filelock": "filelock",
    "gguf": "gguf",
    "hypothesis": "hypothesis",
    "idna": "idna",
    "iniconfig": "iniconfig",
    "lmdb": "lmdb",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "packaging": "packaging",
    "pathspec": "pathspec",
    "platformdirs": "platformdirs",
    "pluggy": "pluggy",
    "prompt_toolkit": "prompt_toolkit",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "Pygments": "pygments",
    "pytest": "pytest",
    "PyStemmer": "Stemmer",
    "PyYAML": "yaml",
    "rich": "rich",
    "shellingham": "shellingham",
    "sortedcontainers": "sortedcontainers",
    "tqdm": "tqdm",
    "typer": "typer",
    "typing-inspection": "typing_inspection",
    "watchfiles": "watchfiles",
    "wcwidth": "wcwidth",
    "xxhash": "xxhash",
    "zstandard": "zstandard",
}
LARGE = {"llvmlite": "llvmlite"}  # 60 MB: a machine with numba has it


def locked() -> dict[str, str]:
    """Versions that this tree is tested with, by distribution in lower case."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def unpack(wheels: Path) -> Path:
    """Put wheels before everything else that Python finds, for this process and its children; the folder."""
    folder = Path(tempfile.mkdtemp(prefix="kvtool-wheels-"))
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder)
    for path in (folder, ROOT):
        sys.path.insert(0, str(path))
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder), *kept])
    importlib.invalidate_caches()
    return folder


def missing() -> list[str]:
    """List what is missing, or at least a major version older than what this tree was tested with, a line each."""
    lines = []
    for name, module in (THERE | CARRIED | LARGE).items():
        if importlib.util.find_spec(module) is None:
            use = (
                "needed"
                if name in THERE
                else "carry its wheel: samples/benchmarks/gpu_wheels.py"
                if name in CARRIED
                else "carry its wheel: samples/benchmarks/gpu_wheels.py --llvmlite"
            )
            lines.append(f"{name} is missing ({use})")
        elif _major(_version(name)) < _major(locked().get(name.lower(), "0")):
            lines.append(
                f"{name} {_version(name)} is older than {locked()[name.lower()]}, which this tree was tested with"
            )
    return lines


def versions() -> dict[str, str]:
    """Return the version of every installed library."""
    return {
        name: _version(name) for name, module in (THERE | CARRIED | LARGE).items() if importlib.util.find_spec(module)
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found.group()) if found else 0
