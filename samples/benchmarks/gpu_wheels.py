"""Download what `gpu.py` needs besides torch, triton, transformers, safetensors, tokenizers and numpy.

    python samples/benchmarks/gpu_wheels.py DIR [--python 3.12] [--llvmlite]

About 10 MB of wheels for Linux on x86-64; with llvmlite, which a machine with numba has already, 60 MB more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from samples.benchmarks.gpu_day.carried import CARRIED, LARGE, locked

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python; default: 3.12")
    parser.add_argument("--llvmlite", action="store_true", help="llvmlite, too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    names = [*CARRIED, *(LARGE if options.llvmlite else ())]
    status = subprocess.run(command(options.folder, options.python, names), check=False).returncode
    if status == 0:
        print(said(options.folder))
    return status


def command(folder: Path, python: str, names: list[str]) -> list[str]:
    """pip's, with the versions that this tree is tested with."""
    pinned = [f"{name}=={locked()[name.lower()]}" for name in names]
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    return [*pip, "--python-version", python, *platforms, "-d", str(folder), *pinned]


def said(folder: Path) -> str:
    """Every wheel with its size, and all together."""
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(folder.glob("*.whl"))}
    lines = [f"{size / 1e6:8.2f} MB  {name}" for name, size in sizes.items()]
    return "\n".join([*lines, f"{sum(sizes.values()) / 1e6:8.2f} MB  in {len(sizes)} wheels"])


if __name__ == "__main__":
    sys.exit(main())
