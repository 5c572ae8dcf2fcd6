"""Options of the server for agents, and the API key that clients of kvtool's servers send."""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.common.files import data_dir, make_folder
from kvtool.core.errors import KvtoolError
from kvtool.core.options.option import Options, option

SERVER = "Server"  # heading in the command's help
_MAX_KEY = 4096  # bytes


@dataclass(frozen=True, kw_only=True)
class AgentOptions(Options, settings=False, group=SERVER):
    """Options of what agents may do, and how they connect."""

    root: tuple[Path, ...] = option(
        (), "Let agents ingest files below this folder.", metavar="FOLDER", unit="path", instead="nothing"
    )
    http: bool = option(False, "Serve HTTP instead of standard input and output.")
    host: str = option("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: int = option(8722, "Port to listen on; 0 takes a free one.", lowest=0, highest=65535)
    key_file: Path | None = option(
        None,
        "File of the key that clients send; created if missing.",
        metavar="FILE",
        unit="path",
        instead="the user's own",
    )
    allow_host: tuple[str, ...] = option((), "Another host name of this server.", metavar="NAME[:PORT]")

    @property
    def key_path(self) -> Path:
        """Return the path of the key's file."""
        return self.key_file or data_dir() / "mcp.key"


def read_key(path: Path) -> str:
    """Read the key in a file; a missing file is created with a new key, readable by its owner only.

    Raises
    ------
    KvtoolError : the file cannot be read or created, is readable by others, or contains no key.
    """
    try:
        make_folder(path.parent)
        _create(path)
        if path.stat().st_mode & 0o077:
            raise KvtoolError(f"others may read the key in {path}", "remove the file, and a new one is made")
        with path.open("rb") as file:
            key = file.read(_MAX_KEY).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no ASCII text"
        raise KvtoolError(f"the key in {path} cannot be read: {why}", "name another with --key-file") from error
    if not key:
        raise KvtoolError(f"{path} holds no key", "remove the file, and a new one is made")
    return key


def is_key(given: str, key: str) -> bool:
    """Return True if what a client sent is the key, compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode("ascii"))


def _create(path: Path) -> None:
    """Write a new key, unless the file exists; no other process ever sees half of one."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(f"kv-{secrets.token_urlsafe(32)}\n")
        with suppress(FileExistsError):  # another server was quicker
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
