"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtool.core.common.files import data_dir
from kvtool.core.common.urls import is_loopback
from kvtool.core.errors import UsageError
from kvtool.core.options.option import Options, option

ADDRESS, ACCESS, DOCUMENTS = "Address", "Access", "Documents"
ANY_ORIGIN = "*"


@dataclass(frozen=True, kw_only=True)
class IdleOptions(Options, sections=("serve",), group="Storage"):
    idle: str = option(
        "missed",
        "Compute KV while no question waits: of what questions missed, of all chunks, or none.",
        setting="idle",
        choices=("missed", "all", "none"),
    )
    idle_load: float = option(
        2.0, "Only while the system's load per core is below this; never on battery.", setting="idle_load", lowest=0
    )


@dataclass(frozen=True, kw_only=True)
class KeepOptions(Options, sections=("query",)):
    keep_alive: float = option(
        300.0,
        "Keep the model loaded after the last question; 0 does not.",
        group="Answer",
        unit="duration",
        lowest=0,
        highest=7 * 86400,
        user_only=True,
        instead="5m on a terminal",
    )
    server: bool = option(
        True, "Ask a running `kvtool serve` of the store, which has loaded the model.", group="Answer", flag=None
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(IdleOptions, sections=("serve",), group="Limits and log"):
    host: str = option("127.0.0.1", "Address to listen on.", group=ADDRESS, setting="serve_host", metavar="ADDRESS")
    port: int = option(
        8321, "Port to listen on; 0 takes a free one.", group=ADDRESS, setting="serve_port", lowest=0, highest=65535
    )
    socket: bool = option(
        True, "Let this user's `kvtool query` use the model by a local socket.", group=ADDRESS, setting="serve_socket"
    )

    key_file: Path | None = option(
        None,
        "File of the API keys, one a line; created with one if missing.",
        group=ACCESS,
        metavar="FILE",
        unit="path",
        instead="serve.key in the user's data folder",
    )
    key: bool = option(
        True, "Require the API key; --no-key only for clients on this machine.", group=ACCESS, setting="serve_key"
    )
    cors_origin: tuple[str, ...] = option(
        (), "Allow web pages of this origin; * allows all.", group=ACCESS, metavar="URL"
    )

    parallel: int = option(8, "Number of answers generated at the same time.", lowest=1)
    queue: int = option(64, "Number of questions that may wait; more get status 429.", lowest=1)
    request_timeout: float = option(300.0, "Time limit per answer, including queueing.", unit="duration", lowest=0.001)
    client_timeout: float = option(30.0, "Maximum time that a client may be idle.", unit="duration", lowest=0.001)
    drain_timeout: float = option(30.0, "Maximum time to finish answers at shutdown.", unit="duration", lowest=0)
    max_body: int = option(16 * 10**6, "Maximum size of a request.", unit="size", lowest=1, instead="16MB")
    memory_cache: int = option(
        10**9, "Memory for loaded chunks.", setting="serve_memory_cache", unit="size", lowest=0, instead="1GB"
    )

    spot: bool = option(
        True, "Reuse stored passages that messages contain, without retrieval.", group=DOCUMENTS, setting="serve_spot"
    )
    any_model: bool = option(
        False, "Answer to every model name that a client sends.", group=ACCESS, setting="serve_any_model"
    )
    strict: bool = option(
        False, "Refuse a question without passages, instead of answering it.", group=DOCUMENTS, setting="serve_strict"
    )
    learn: bool = option(
        False, "Store passages that clients send repeatedly, and reuse them.", group=DOCUMENTS, setting="serve_learn"
    )
    learn_budget: int = option(
        2 * 10**9, "Disk space for learned passages.", group=DOCUMENTS, unit="size", lowest=1, instead="2GB"
    )
    isolate: bool = option(
        True, "Share no learned passages or conversations between API keys.", group=DOCUMENTS, setting="serve_isolate"
    )
    keep_conversations: int = option(
        5 * 10**8, "Memory for conversations that may continue; 0 keeps none.", unit="size", lowest=0, instead="500MB"
    )

    uploads: Path | None = option(
        None, "Let clients upload documents into this folder.", group=DOCUMENTS, metavar="FOLDER", unit="path"
    )
    request_log: Path | None = option(
        None, "Write one line per request to this file.", metavar="FILE", unit="path", instead="stdout"
    )

    @property
    def key_path(self) -> Path:
        return self.key_file or data_dir() / "serve.key"

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)

    def check(self) -> None:
        if self.learn and not self.spot:
            raise UsageError("--learn finds passages in messages, and --no-spot does not look there", "leave one out")
        if self.key:
            return
        if not self.is_local:
            raise UsageError(
                f"--no-key at {self.host} would answer anybody who reaches it",
                "leave --no-key out, or listen at 127.0.0.1",
            )
        if ANY_ORIGIN in self.cors_origin:
            raise UsageError("--no-key and --cors-origin * would answer any web page", "name the page's origin")
