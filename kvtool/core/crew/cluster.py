"""A cluster of Ray: whether it is there, and what each of several workers may take of it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvtool.core.common.installing import extra_line
from kvtool.core.crew.options import AUTO, LOCAL
from kvtool.core.errors import KvtoolError, UsageError

_PORT, _PATIENCE = 6379, 10.0  # of a cluster's head; seconds for a connection
_WHERE = "--ray local, or the address of a running cluster, such as 10.0.0.5:6379"
_TOKEN = "where the cluster asks for a token, set RAY_AUTH_MODE=token, or name another cluster"
_CORES = 8  # of a worker without a GPU, where nobody says how many there are to be


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's share of a cluster."""

    workers: int
    cpus: int
    gpus: int

    @property
    def threads(self) -> int:
        """Return the number of threads for a process; 0: no limit."""
        return 0 if self.gpus else self.cpus


def share_of(resources: dict[str, float], workers: int, device: str) -> Share:
    """Return each worker's share of a cluster; 0 workers: as many as fit. Raises UsageError if it has less."""
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if gpus and device in ("auto", "cuda"):
        if workers > gpus:
            raise UsageError(f"{workers} workers, and Ray has {gpus} GPUs", "each takes one: lower --ray-workers")
        return Share(workers or gpus, 1, 1)
    if workers > cpus:
        raise UsageError(f"{workers} workers, and Ray has {cpus} CPUs", "lower --ray-workers")
    workers = workers or max(1, cpus // _CORES)
    return Share(workers, max(1, cpus // workers), 0)


def check_there(address: str) -> None:
    """Refuse an address behind which nothing listens: Ray itself tries for a quarter of an hour.

    Raises
    ------
    KvtoolError : it does, or Ray is not installed.
    """
    _ray()
    if address in (LOCAL, AUTO):
        return
    try:
        place = urlsplit(address if "://" in address else f"ray://{address}")
        socket.create_connection((place.hostname or "", place.port or _PORT), timeout=_PATIENCE).close()
    except (OSError, ValueError) as error:
        raise KvtoolError(f"Ray does not answer at {address!r}: {error}", _WHERE) from error


def connected(address: str) -> Any:
    """Ray itself, connected to a cluster. Raises KvtoolError."""
    ray = _ray()
    try:
        with _same_end():
            ray.init(
                address=address,
                include_dashboard=False if address == LOCAL else None,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
    except Exception as error:
        hint = _WHERE if address in (LOCAL, AUTO) else _TOKEN  # something listens there: `check_there` has seen it
        raise KvtoolError(f"Ray does not answer at {address!r}: {reason_of(error)}", hint) from error
    _quieten()
    return ray


@contextmanager
def _same_end() -> Iterator[None]:
    """Keep what SIGTERM does, where it is something: Ray puts ends of its own in its place, and exits with 1 or 15."""
    before, ended = signal.getsignal(signal.SIGTERM), None
    is_kept = callable(before) and threading.current_thread() is threading.main_thread()
    try:
        yield
    except SystemExit as error:  # it came while Ray starts
        ended = error
    finally:
        if is_kept:
            signal.signal(signal.SIGTERM, before)
    if ended is not None:
        if is_kept:
            signal.raise_signal(signal.SIGTERM)
        raise ended


def reason_of(error: Exception) -> str:
    """The first sentence of its last line: what follows is advice for who looks after the cluster."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(". ")[0].rstrip(".") if lines else type(error).__name__


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise KvtoolError("--ray needs the package ray", extra_line("ray")) from error
    return ray


def _quieten() -> None:
    """Keep Ray's own words about dead workers from stdout, where answers and JSON go; there is no setting for it."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *data, **how: None
