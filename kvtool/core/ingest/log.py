"""`--log`: what an ingest does, one JSON event a line, appended to a file that outlives the run."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kvtool.core.common.types import Events
from kvtool.core.errors import UsageError


class EventLog:
    """Appends events; runs that overlap may share a file, each line names its process.

    Raises
    ------
    UsageError : the file cannot be written; said before anything is done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""  # why nothing is written any more: a full disk under the log ends no ingest
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            os.set_blocking(self._file, True)  # opening waits for no reader of a FIFO
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"the log {path} cannot be written: {reason}", "--log takes a file in a folder that is there"
            ) from error

    def event(self, type: Literal["status", "warning", "error", "summary"], **facts: Any) -> None:
        """Append one line, at once and in one piece."""
        if self.error:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps(_plain({"time": now, "pid": os.getpid(), "type": type} | facts)) + "\n"
        try:
            os.write(self._file, line.encode("ascii"))
        except OSError as error:
            self.error = error.strerror or str(error)

    def listening(self, events: Events) -> Events:
        """Make events that are written to the log, too."""

        def warn(text: str, hint: str) -> None:
            self.event("warning", message=text, hint=hint)
            events.warn(text, hint)

        def failed(path: str, reason: str) -> None:
            self.event("error", message=reason, path=path)
            events.failed(path, reason)

        def status(text: str) -> None:
            self.event("status", message=text)
            events.status(text)

        def step(label: str, total: int, unit: str) -> None:
            self.event("status", message=label, total=total, unit=unit)
            events.step(label, total, unit)

        return replace(events, warn=warn, failed=failed, status=status, step=step)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _plain(value: Any) -> Any:
    """Make of a value what any parser of JSON takes: a number that is none becomes null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
