"""Tries the oldest, or the newest, versions of the libraries that `pyproject.toml` allows.

    python samples/tools/ranges.py --pin torch==2.13.0 oldest FOLDER -- -n 2

makes a virtual environment in FOLDER with this package, its extras but `peers`, and every library at its lower bound
(`newest`: with pip's own choice), and runs the quick tests of the code that uses them in it. `--pin` holds a library
to a version, `--brief` takes fewer tests, which still touch every library, `--extend` reuses what FOLDER
has; arguments after `--` are pytest's. It takes some gigabytes, where pip knows no torch without CUDA.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
# Loading and probing models, both ways of packing their weights, the laws, machine code, what the command line imports;
# then what each extra is for.
QUICK = (
    *("tests/checkpoint/test_load.py", "tests/checkpoint/test_gguf.py", "tests/model/test_packed.py"),
    *("tests/model/test_latent.py", "tests/model/test_states.py", "tests/fusion/test_against_transformers.py"),
    *("tests/laws/test_1_recompute_everything.py", "tests/laws/test_4_moved_chunk.py"),
    *("tests/native", "tests/codec/test_levels.py", "tests/cache/test_store.py", "tests/cli/test_startup.py"),
    *("tests/cli/test_app.py", "tests/cli/test_help.py", "tests/cli/test_out.py", "tests/cli/test_chat.py"),
    *("tests/corpus", "tests/cli/test_documents.py", "tests/chaos/test_processes.py"),
    *("tests/retrieval/test_vectors.py", "tests/remote/test_transfer.py", "tests/serve", "tests/agent"),
    *("tests/remote/test_blobs.py", "tests/remote/test_objects.py", "tests/ingest/test_ray.py"),
)
# What each library is for, once.
BRIEF = (
    *("tests/checkpoint/test_load.py", "tests/checkpoint/test_gguf.py::test_model_is_the_original"),
    *("tests/checkpoint/test_gguf.py::test_two_at_once", "tests/native/test_objects.py"),
    "tests/fusion/test_against_transformers.py::test_what_is_broken_is_caught",
    *("tests/codec/test_levels.py", "tests/cache/test_store.py"),
    *("tests/cli/test_startup.py", "tests/cli/test_help.py", "tests/cli/test_out.py", "tests/cli/test_chat.py"),
    *("tests/cli/test_completion.py", "tests/corpus", "tests/cli/test_documents.py", "tests/chaos/test_processes.py"),
    *("tests/retrieval/test_vectors.py", "tests/remote/test_blobs.py", "tests/serve/test_openai.py"),
    *("tests/serve/test_process.py", "tests/agent", "tests/ingest/test_ray.py::test_unreachable_clusters"),
    "tests/remote/test_objects.py::test_credentials_of_a_profile",
    "tests/ingest/test_ray.py::test_workers_make_what_one_process_makes",
)
TESTING = ("pytest", "pytest-xdist", "hypothesis", "openai", "trustme", "flask", "flask-cors", "moto[s3]")
NOT_BUILT = ("peers", "dev")
# Old libraries may warn of their own outdated libraries, which a user cannot change.
QUIET = [f"-Wignore::{name}" for name in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")]
_BOUND = re.compile(r"([\w.-]+(?:\[[\w,]+\])?)>=([\w.]+)")


def settings() -> dict[str, Any]:
    """Read the project table of `pyproject.toml`."""
    project: dict[str, Any] = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def extras() -> list[str]:
    """List the extras that are tried."""
    return [name for name in settings()["optional-dependencies"] if name not in NOT_BUILT]


def oldest() -> list[str]:
    """Every library that kvtool and its extras ask for, at the lower bound of its range."""
    project = settings()
    lines = [*project["dependencies"], *(line for name in extras() for line in project["optional-dependencies"][name])]
    found = [_BOUND.match(line) for line in lines]
    return [f"{bound[1]}=={bound[2]}" for bound in found if bound is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pin", action="append", default=[], metavar="LIBRARY==VERSION")
    parser.add_argument("--brief", action="store_true", help="fewer tests, of every library")
    parser.add_argument("--extend", action="store_true", help="install into FOLDER's environment as it is")
    parser.add_argument("pytest", nargs="*", help="more arguments of pytest")
    given = parser.parse_args()
    if not given.extend:
        venv.create(given.folder, with_pip=True)
    python = str(given.folder.absolute() / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    held = {pin.partition("==")[0] for pin in given.pin}
    pins = [pin for pin in oldest() if pin.partition("==")[0] not in held] if given.which == "oldest" else []
    package = f"{HERE}[{','.join(extras())}]"
    subprocess.run([python, "-m", "pip", "install", package, *pins, *given.pin, *TESTING], check=True)
    subprocess.run([python, "-m", "pip", "list"], check=True)
    tests = [python, "-m", "pytest", "-q", *QUIET, "-m", "not slow and not model"]
    tests += [*(BRIEF if given.brief else QUICK), *given.pytest]
    return subprocess.run(tests, cwd=HERE).returncode


if __name__ == "__main__":
    sys.exit(main())
