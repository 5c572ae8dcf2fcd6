"""Progress of a job of several steps: one bar after another."""

from __future__ import annotations

from typing import Any

from kvtool.cli.options import Run
from kvtool.cli.text import one_line
from kvtool.core.common.progress import Events


class JobView:
    """Shows what a job tells: a bar for each step from the moment its length is known, warnings, files by name."""

    def __init__(self, run: Run) -> None:
        self._out = run.out
        self._progress: Any = None
        self._bar: Any = None
        self.events = Events(
            step=self._step,
            advance=self._advance,
            status=self._out.doing,
            warn=self._out.warning,
            failed=self._out.failed,
            skipped=lambda path, reason: self._out.detail(one_line(f"skipped {path}: {reason}")),
        )

    def __enter__(self) -> JobView:
        return self

    def __exit__(self, *error: Any) -> None:
        self._close(*error)

    def _step(self, label: str, total: int, unit: str) -> None:
        self._close()
        self._progress = self._out.progress(label, total=total, unit=unit)
        self._bar = self._progress.__enter__()

    def _close(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.__exit__(*(error or (None, None, None)))
            self._progress = None

    def _advance(self, count: float) -> None:
        if self._progress is not None:
            self._bar.advance(count)
