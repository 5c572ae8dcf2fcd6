"""Connection to a Ray cluster, and its division among workers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvtool.core.common.installing import extra_line
from kvtool.core.errors import KvtoolError, UsageError

LOCAL, AUTO = "local", "auto"  # auto: the cluster that this machine is part of
_PORT, _CONNECT_TIMEOUT = 6379, 10.0  # of a cluster's head; seconds
_WHERE = "--ray local, or the address of a running cluster, such as 10.0.0.5:6379"
_TOKEN = "where the cluster asks for a token, set RAY_AUTH_MODE=token, or name another cluster"
_CORES = 8  # per worker without a GPU, if no number of workers is given


@dataclass(frozen=True, slots=True)
class Share:
    workers: int
    cpus: int
    gpus: int


def share_of(resources: dict[str, float], workers: int, device: str) -> Share:
    """Divide a cluster among workers; 0 workers: as many as fit. Raises UsageError if the cluster has fewer."""
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if gpus and device in ("auto", "cuda"):
        if workers > gpus:
            raise UsageError(f"{workers} workers, and Ray has {gpus} GPUs", "each takes one: lower --ray-workers")
        return Share(workers or gpus, 1, 1)
    if workers > cpus:
        raise UsageError(f"{workers} workers, and Ray has {cpus} CPUs", "lower --ray-workers")
    workers = workers or max(1, cpus // _CORES)
    return Share(workers, max(1, cpus // workers), 0)


def check_reachable(address: str) -> None:
    """Raise KvtoolError if nothing listens at an address: Ray itself would retry for a quarter of an hour."""
    _import_ray()
    if address in (LOCAL, AUTO):
        return
    try:
        url = urlsplit(address if "://" in address else f"ray://{address}")
        socket.create_connection((url.hostname or "", url.port or _PORT), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise KvtoolError(f"Ray does not answer at {address!r}: {error}", _WHERE) from error


def connect(address: str) -> Any:
    """Return the module `ray`, connected to a cluster. Raises KvtoolError."""
    ray = _import_ray()
    try:
        _keep_sigterm(
            lambda: ray.init(
                address=address,
                include_dashboard=False if address == LOCAL else None,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
        )
    except Exception as error:
        hint = _WHERE if address in (LOCAL, AUTO) else _TOKEN  # `check_reachable` has found that something listens
        raise KvtoolError(f"Ray does not answer at {address!r}: {reason_of(error)}", hint) from error
    return ray


def _keep_sigterm(start: Callable[[], object]) -> None:
    """Start Ray and restore the handler of SIGTERM: Ray installs one that exits with status 15."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        start()
        return
    try:
        start()
    except SystemExit:  # SIGTERM came meanwhile
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error's last line; the rest is advice for the cluster's administrator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(". ")[0].rstrip(".") if lines else type(error).__name__


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise KvtoolError("--ray needs the package ray", extra_line("ray")) from error
    return ray
