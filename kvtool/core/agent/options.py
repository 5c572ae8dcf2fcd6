"""Options of the server for agents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtool.core.options.option import Options, option

SERVER = "Server"  # heading in the command's help


@dataclass(frozen=True, kw_only=True)
class AgentOptions(Options, settings=False, group=SERVER):
    """Options of what agents may do, and how they connect."""

    root: tuple[Path, ...] = option(
        (), "Let agents ingest what lies below this folder.", metavar="FOLDER", unit="path", instead="nothing"
    )
    http: bool = option(False, "Listen to streamable HTTP, not to standard input.")
    host: str = option("127.0.0.1", "Where to listen.", metavar="ADDRESS")
    port: int = option(8722, "Where to listen; 0 takes a free one.", lowest=0, highest=65535)
    key_file: Path | None = option(
        None,
        "The key that clients send; made where it is missing.",
        metavar="FILE",
        unit="path",
        instead="the user's own",
    )
    allow_host: tuple[str, ...] = option(
        (), "A further name under which clients reach the server.", metavar="NAME[:PORT]"
    )
