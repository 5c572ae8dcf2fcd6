"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtool.core.common.urls import is_loopback
from kvtool.core.errors import UsageError
from kvtool.core.options.option import Options, option

ADDRESS, ACCESS, LIMITS, DOCUMENTS = "Address", "Who may ask", "Limits and log", "Documents"
ANY_ORIGIN = "*"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options, sections=("serve",)):
    """Options of a server: its address, its clients, and its limits."""

    host: str = option("127.0.0.1", "Address to listen at.", group=ADDRESS, setting="serve_host", metavar="ADDRESS")
    port: int = option(
        8321, "Port to listen at; 0 takes a free one.", group=ADDRESS, setting="serve_port", lowest=0, highest=65535
    )
    tls_cert: Path | None = option(
        None, "Certificate chain in PEM, for https.", group=ADDRESS, metavar="FILE", unit="path"
    )
    tls_key: Path | None = option(None, "Its private key in PEM.", group=ADDRESS, metavar="FILE", unit="path")
    socket: bool = option(
        True,
        "Let `kvtool query` of this user use the model that is loaded here, by a socket beside the store.",
        group=ADDRESS,
        flag="--socket/--no-socket",
        setting="serve_socket",
    )

    key_file: Path | None = option(
        None,
        "File that holds the API key; it is made where it is missing.",
        group=ACCESS,
        metavar="FILE",
        unit="path",
        instead="serve.key in the user's data folder",
    )
    key: bool = option(
        True,
        "Ask for the API key; without it only this machine may be listened to.",
        group=ACCESS,
        flag="--key/--no-key",
        setting="serve_key",
    )
    cors_origin: tuple[str, ...] = option(
        (), "Let pages of this origin ask, such as http://localhost:3000; * is any.", group=ACCESS, metavar="URL"
    )

    parallel: int = option(8, "How many answers are written at a time.", group=LIMITS, lowest=1)
    queue: int = option(64, "How many questions may wait; more are turned away with 429.", group=LIMITS, lowest=1)
    request_timeout: float = option(
        300.0, "How long an answer may take, waiting included.", group=LIMITS, unit="duration", lowest=0.001
    )
    client_timeout: float = option(
        30.0, "How long a client may neither send nor read.", group=LIMITS, unit="duration", lowest=0.001
    )
    drain_timeout: float = option(
        30.0, "How long begun answers may take at the end.", group=LIMITS, unit="duration", lowest=0
    )
    max_body: int = option(16 * 10**6, "Longest request.", group=LIMITS, unit="size", lowest=1, instead="16MB")
    hot_memory: int = option(
        10**9,
        "What may be held of loaded chunks.",
        group=LIMITS,
        setting="serve_hot_memory",
        unit="size",
        lowest=0,
        instead="1GB",
    )

    keep_conversations: int = option(
        5 * 10**8,
        "What may be held of conversations until they go on; 0 holds none.",
        group=LIMITS,
        unit="size",
        lowest=0,
        instead="500MB",
    )

    root: tuple[Path, ...] = option(
        (),
        "Folder whose files clients may have ingested by their paths.",
        group=DOCUMENTS,
        metavar="FOLDER",
        unit="path",
    )
    uploads: Path | None = option(
        None,
        "Folder for documents that clients send; without it they cannot send any.",
        group=DOCUMENTS,
        metavar="FOLDER",
        unit="path",
    )
    request_log: Path | None = option(
        None, "Write the line of each request there.", group=LIMITS, metavar="FILE", unit="path", instead="stdout"
    )

    @property
    def is_local(self) -> bool:
        """Return True if only this machine can reach it."""
        return is_loopback(self.host)

    def check(self) -> None:
        """Refuse a server that anybody could use."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together", "give both files, or neither")
        if self.key:
            return
        if not self.is_local:
            raise UsageError(
                f"--no-key at {self.host} would answer anybody who reaches it",
                "leave --no-key out, or listen at 127.0.0.1",
            )
        if ANY_ORIGIN in self.cors_origin:
            raise UsageError("--no-key and --cors-origin * would answer any web page", "name the page's origin")
