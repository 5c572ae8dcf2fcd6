"""Default folders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kvtool.core.errors import UsageError


def data_dir() -> Path:
    """Folder of the default store (`$KVTOOL_HOME/data`, else the platform's user data folder)."""
    return _state_folder("data")


def cache_dir() -> Path:
    """Folder of what can be made again (`$KVTOOL_CACHE`, `$KVTOOL_HOME/cache`, else the platform's cache folder)."""
    override = os.environ.get("KVTOOL_CACHE")
    return Path(override).expanduser() if override else _state_folder("cache")


def default_config_file(environ: Mapping[str, str]) -> Path:
    """The user's config file when no variable names one."""
    home = environ.get("KVTOOL_HOME")
    if home:
        return Path(home).expanduser() / "config.toml"
    import platformdirs

    return platformdirs.user_config_path("kvtool", appauthor=False) / "config.toml"


def _state_folder(kind: Literal["data", "cache"]) -> Path:
    home = os.environ.get("KVTOOL_HOME")
    if home:
        return Path(home).expanduser() / kind
    import platformdirs

    find = platformdirs.user_data_path if kind == "data" else platformdirs.user_cache_path
    folder = find("kvtool", appauthor=False)
    if not folder.is_absolute():  # an unexpanded "~": neither HOME nor an entry in the user database
        raise UsageError(f"no {kind} folder: this user has no home folder", "set KVTOOL_HOME to a writable folder")
    return folder
