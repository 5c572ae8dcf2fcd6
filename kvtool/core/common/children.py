"""Starting another Python that runs kvtool's own code, and nothing that lies in the working directory."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

HOME = Path(__file__).absolute().parents[3]  # where this kvtool is imported from


def python(program: str, *args: str) -> list[str]:
    """Make the command line of a Python that runs `program`, with `args` as `sys.argv[1:]`.

    `python -c` puts the working directory first on its search path: a `json.py` in a folder of somebody's documents
    would be run. The child starts isolated and is given this process's search path, so that it runs the same kvtool
    wherever that comes from (`PYTHONPATH`, an editable install, a notebook's own changes).
    """
    return [sys.executable, "-I", "-c", f"import sys\nsys.path[:] = {search_path()!r}\n{program}", *args]


def search_path() -> list[str]:
    """This process's search path without the working directory, unless that is where kvtool or Python itself is."""
    allowed = {os.path.realpath(place) for place in (str(HOME), *sysconfig.get_paths().values())}
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed: no relative entry means anything
        return [entry for entry in sys.path if os.path.isabs(entry)]
    return [os.path.abspath(entry) for entry in sys.path if os.path.realpath(entry) != here or here in allowed]
