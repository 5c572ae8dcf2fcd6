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
