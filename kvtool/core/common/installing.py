"""Install lines: commands that install packages next to kvtool, for the way in which it was installed."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def install_line(*requirements: str) -> str:
    """Command that installs into kvtool's environment, which pipx or `uv tool` may own. `requirements`: quoted."""
    home = Path(sys.prefix)
    if (home / "pipx_metadata.json").is_file():
        command = f"pipx runpip {shlex.quote(home.name)} install"
    elif (home / "uv-receipt.toml").is_file():
        command = f"uv pip install --python {shlex.quote(sys.prefix)}"
    elif shutil.which("pip") == str(home / "bin" / "pip"):
        command = "pip install"
    else:  # the environment is not activated
        command = f"{shlex.quote(sys.executable)} -m pip install"
    return " ".join((command, *requirements))


def extra_line(extra: str) -> str:
    return install_line(f"'kvtool[{extra}]'")
