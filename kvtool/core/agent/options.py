"""Options of the server for agents, and the API keys that clients of kvtool's servers send."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.common.files import data_dir, make_folder
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.options.option import Options, option

SERVER = "Server"  # heading in the command's help
_LONGEST = 1 << 16  # bytes of a key file
_SHORTEST = 16  # characters of a key: a shorter one can be guessed


@dataclass(frozen=True, kw_only=True)
class AgentOptions(Options, settings=False, group=SERVER):
    root: tuple[Path, ...] = option(
        (), "Let agents ingest files below this folder.", metavar="FOLDER", unit="path", instead="nothing"
    )
    http: bool = option(False, "Serve HTTP instead of standard input and output.")
    host: str = option("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: int = option(8722, "Port to listen on; 0 takes a free one.", lowest=0, highest=65535)
    key_file: Path | None = option(
        None,
        "File of the keys that clients send, one a line; created with one if missing.",
        metavar="FILE",
        unit="path",
        instead="the user's own",
    )
    allow_host: tuple[str, ...] = option((), "Another host name of this server.", metavar="NAME[:PORT]")

    @property
    def key_path(self) -> Path:
        return self.key_file or data_dir() / "mcp.key"


def read_keys(path: Path) -> tuple[str, ...]:
    """Read the keys in a file, one a line, but no comments (`#`); a missing file is created with a new key.

    Raises UsageError for no key, or a line that is none, and KvtoolError for a file that others can read.
    """
    try:
        make_folder(path.parent)
        _create(path)
        if path.stat().st_mode & 0o077:
            raise KvtoolError(f"others may read the key in {path}", "remove the file, and a new one is made")
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
        lines = [line.strip() for line in data.decode("ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no ASCII text"
        raise KvtoolError(f"the key in {path} cannot be read: {why}", "name another with --key-file") from error
    if len(data) > _LONGEST:
        raise UsageError(f"{path} is longer than {_LONGEST:,} bytes", "name a file of keys, one a line")
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#") and (len(line) < _SHORTEST or len(line.split()) > 1):
            hint = f"a line has one key of at least {_SHORTEST} characters, without spaces; a comment is a line with #"
            raise UsageError(f"line {number} of {path} is no key", hint)  # the line itself may be a secret
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError(f"{path} holds no key", "remove the file, and a new one is made")
    return keys


def key_of(given: str, keys: Sequence[str]) -> str | None:
    sent = given.encode("utf-8", "replace")
    same = [key for key in keys if hmac.compare_digest(sent, key.encode("ascii"))]
    return same[0] if same else None


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
