"""Tries the oldest, or the newest, versions of the libraries that `pyproject.toml` allows.

    python samples/ranges.py oldest FOLDER [-- -k gguf]

makes a virtual environment in FOLDER with this package and with every library at its lower bound (`newest`: with what
pip takes by itself), and runs the quick tests of what leans on them in it; what stands behind `--` goes to pytest. It
takes some gigabytes, where pip knows no torch without CUDA.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
# Loading and probing models, both ways of packing their weights, the laws, machine code, what the command line imports.
QUICK = (
    *("tests/model/test_load.py", "tests/model/test_gguf.py", "tests/model/test_packed.py"),
    *("tests/model/test_latent.py", "tests/model/test_states.py", "tests/fusion/test_against_transformers.py"),
    *("tests/laws/test_1_recompute_everything.py", "tests/laws/test_4_moved_chunk.py"),
    *("tests/native", "tests/codec/test_levels.py", "tests/cache/test_store.py", "tests/cli/test_startup.py"),
)
TESTING = ("pytest", "pytest-xdist", "hypothesis")
_BOUND = re.compile(r"([\w.-]+)(\[[\w,]+\])?>=([\w.]+)")


def oldest() -> list[str]:
    """Every library that kvtool asks for, at the lower bound of its range."""
    settings = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    found = [_BOUND.match(line) for line in settings["project"]["dependencies"]]
    return [f"{bound[1]}=={bound[3]}" for bound in found if bound is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("pytest", nargs="*", help="more arguments of pytest")
    given = parser.parse_args()
    venv.create(given.folder, with_pip=True)
    python = str(given.folder.absolute() / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    pins = oldest() if given.which == "oldest" else []
    subprocess.run([python, "-m", "pip", "install", f"{HERE}[redis]", *pins, *TESTING], check=True)
    subprocess.run([python, "-m", "pip", "list"], check=True)
    tests = [python, "-m", "pytest", "-q", "-m", "not slow and not model", *QUICK, *given.pytest]
    return subprocess.run(tests, cwd=HERE).returncode


if __name__ == "__main__":
    sys.exit(main())
